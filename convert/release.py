"""A release: legacy files in; GGUF files and their manifest out, all together or not at all.

manifest = convert_body(
    Request(out=Path("body.gguf"), checkpoint=Path("model.ckpt"), mhr=Path("mhr_model.pt"))
)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sam3d_gguf.convert.binding import BoundContract
from sam3d_gguf.convert.contract import load_contract
from sam3d_gguf.convert.files import (
    body_component_values,
    component_file,
    known_answer,
    mhr_component_values,
    single_file,
)
from sam3d_gguf.convert.manifest import (
    Manifest,
    ManifestFile,
    ManifestSource,
    NativeContract,
    left_out_items,
    manifest_file,
    numbered_note,
)
from sam3d_gguf.convert.metadata import CompanionDigests
from sam3d_gguf.convert.mhr_names import MhrNames, read_names
from sam3d_gguf.convert.plan import PlannedFile
from sam3d_gguf.convert.preflight import require_acceptable, require_kinds
from sam3d_gguf.convert.problems import naming_file
from sam3d_gguf.convert.products import (
    Products,
    kept_products_from_source,
    products_from_folder,
    products_from_source,
    specs,
)
from sam3d_gguf.convert.request import CONFIG_ROLE, KEPT_MHR, MHR_NAME, Request, read_config
from sam3d_gguf.convert.stream import WrittenFile, write_gguf
from sam3d_gguf.extractors.extraction import Extraction, Origin, SourceIdentity
from sam3d_gguf.extractors.models import ROLES, Model
from sam3d_gguf.extractors.new_folder import NewFolder, new_folder
from sam3d_gguf.extractors.progress import QUIET, Progress
from sam3d_gguf.extractors.publication import PublicationSet
from sam3d_gguf.extractors.sandbox.job import SandboxChoice
from sam3d_gguf.extractors.scratch import scratch_in
from sam3d_gguf.extractors.target_folder import output_error
from sam3d_gguf.schemas.documents import encode_document
from sam3d_gguf.schemas.errors import ContractError

_P = TypeVar("_P", bound=Products)


def convert_body(request: Request, progress: Progress = QUIET) -> Manifest:
    """Convert SAM 3D Body, and MHR with it if it is given.

    Raises:
        InputError: a source is of the wrong kind, malformed, not pinned, or changed meanwhile.
        ContractError: tensors, values or the configuration don't meet the contract.
        SandboxError: the sandbox is missing, or ended its reader.
        OutputError: an output exists, or can't be written.
    """
    with _run("body", request, progress) as run:
        require_kinds("body", request)
        config, identity = read_config(request)
        require_acceptable("body", request)
        mhr = None if request.mhr is None else run.open_mhr(request.mhr)
        products = run.open("body", request.checkpoint, request.extraction)
        source = products.extraction.source
        pinned = source.origin == identity.origin == "pinned"
        bound = load_contract("body").bind(
            specs(products), config, official=pinned, where=source.name
        )
        if mhr is not None:
            _require_equal_dimensions(bound, mhr.bound)
        body = _Body(products, bound, identity)
        if request.layout == "components":
            _write_components(run, body, mhr)
        else:
            _write_single(run, body, mhr)
        return run.publish("body", body, mhr)


def convert_mhr(request: Request, progress: Progress = QUIET) -> Manifest:
    """Convert MHR alone; see `convert_body` for the errors."""
    with _run("mhr", request, progress) as run:
        require_kinds("mhr", request)
        require_acceptable("mhr", request)
        mhr = _bind_mhr(run.open("mhr", request.checkpoint, request.extraction))
        run.write(_mhr_single(mhr, request.out.name, run), mhr.products)
        return run.publish("mhr", None, mhr)


def extract_to_folder(
    model: Model,
    path: Path,
    folder: Path,
    *,
    sandbox: SandboxChoice | None = None,
    allow_unpinned: bool = False,
    progress: Progress = QUIET,
) -> Extraction:
    """Extract a legacy file into a new folder: safetensors, and `extraction.json` beside them.

    Raises:
        InputError: the file is of another kind, malformed, not pinned, or changed meanwhile.
        SandboxError: the sandbox is missing, or ended its reader.
        OutputError: the folder exists, or can't be written.
    """
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(new_folder(folder))
        publications = stack.enter_context(PublicationSet())
        scratch = stack.enter_context(scratch_in(folder.absolute().parent))
        products = stack.enter_context(
            kept_products_from_source(
                model,
                path,
                scratch,
                sandbox=sandbox,
                allow_unpinned=allow_unpinned,
                progress=progress,
            )
        )
        products.publish(publications, target.unfinished)
        publications.commit()
        target.appear()
        return products.extraction


@dataclass(frozen=True, slots=True)
class _Body:
    """Body's products, its contract with numbers, and its configuration's file."""

    products: Products
    bound: BoundContract
    config: SourceIdentity


@dataclass(frozen=True, slots=True)
class _Mhr:
    """MHR's products, its contract with numbers, and its names."""

    products: Products
    bound: BoundContract
    names: MhrNames


def _bind_mhr(products: Products) -> _Mhr:
    source = products.extraction.source
    bound = load_contract("mhr.lod1").bind(
        specs(products), official=source.origin == "pinned", where=source.name
    )
    with naming_file(source.name):
        return _Mhr(products, bound, read_names(products, bound))


def _require_equal_dimensions(body: BoundContract, mhr: BoundContract) -> None:
    (companion,) = body.contract.companions
    unequal = [
        f"{name} is {body.dims[name]} in Body and {mhr.dims[name]} in MHR"
        for name in companion.equal_dimensions
        if body.dims[name] != mhr.dims[name]
    ]
    if unequal:
        raise ContractError(
            "the Body model and the MHR asset don't belong together: " + "; ".join(unequal)
        )


def _write_single(run: _Run, body: _Body, mhr: _Mhr | None) -> None:
    companions: list[CompanionDigests] = []
    if mhr is not None:
        written = run.write(_mhr_single(mhr, MHR_NAME, run), mhr.products)
        companions.append(
            CompanionDigests(
                "mhr",
                written.planned.architecture,
                written.content_sha256,
                written.semantics_sha256,
            )
        )
    planned = single_file(
        body.products.extraction,
        body.bound,
        run.request.out.name,
        run.request.effective_precision(),
        config=body.config,
        companions=companions,
    )
    run.write(planned, body.products, companions)


def _mhr_single(mhr: _Mhr, name: str, run: _Run) -> PlannedFile:
    precision = run.request.effective_precision()
    return single_file(mhr.products.extraction, mhr.bound, name, precision, names=mhr.names)


def _write_components(run: _Run, body: _Body, mhr: _Mhr | None) -> None:
    asset = None if mhr is None else mhr.products.extraction
    extraction = body.products.extraction
    if mhr is not None and asset is not None:
        values = mhr_component_values(asset, mhr.names)
        planned = component_file("mhr.lod1", asset, mhr.bound, values, mhr.names)
        run.write(planned, mhr.products)
    for component in ("body.dinov3_backbone", "body.pose_branch"):
        values = body_component_values(extraction, body.config, asset, component)
        run.write(component_file(component, extraction, body.bound, values), body.products)


@contextlib.contextmanager
def _run(model: Model, request: Request, progress: Progress) -> Generator[_Run]:
    """Prepare the folders and check that no output exists, before anything costs time."""
    request.check(model)
    with contextlib.ExitStack() as stack:
        target = None
        if request.layout == "components":
            target = stack.enter_context(new_folder(request.out))
        publications = stack.enter_context(PublicationSet())
        outputs = () if target else request.outputs()
        for path in (*outputs, *request.kept_files(model)):
            publications.require_absent(path)
        kept = request.keep_safetensors
        if kept is not None and not kept.is_dir():
            publications.require_absent(kept)
        yield _Run(request, progress, publications, stack, target)


class _Run:
    """One conversion: what it has opened and written so far."""

    def __init__(
        self,
        request: Request,
        progress: Progress,
        publications: PublicationSet,
        stack: contextlib.ExitStack,
        target: NewFolder | None,
    ) -> None:
        self.request = request
        self._progress = progress
        self._publications = publications
        self._stack = stack
        self._target = target
        self._folder = request.folder if target is None else target.unfinished
        self._written: list[tuple[WrittenFile, list[CompanionDigests]]] = []

    def open(self, model: Model, source: Path | None, folder: Path | None) -> Products:
        """The safetensors of a model, from an earlier extraction or from a legacy file."""
        request = self.request
        kept = None if folder is not None else self._kept_folder(model)
        scratch = self._scratch(kept or request.out.absolute().parent)
        if folder is not None:
            return self._stack.enter_context(
                products_from_folder(
                    model,
                    folder,
                    source=source,
                    scratch=scratch,
                    sandbox=request.sandbox,
                    allow_unpinned=request.allow_unpinned,
                    progress=self._progress,
                )
            )
        if source is None:
            raise ValueError("neither a legacy file nor an extraction is given")
        if kept is None:
            return self._stack.enter_context(
                self._from(products_from_source, model, source, scratch)
            )
        products = self._stack.enter_context(
            self._from(kept_products_from_source, model, source, scratch)
        )
        products.publish(self._publications, kept)
        return products

    def _from(
        self,
        products: Callable[..., AbstractContextManager[_P]],
        model: Model,
        source: Path,
        scratch: Path,
    ) -> AbstractContextManager[_P]:
        return products(
            model,
            source,
            scratch,
            sandbox=self.request.sandbox,
            allow_unpinned=self.request.allow_unpinned,
            progress=self._progress,
        )

    def open_mhr(self, path: Path) -> _Mhr:
        """MHR, from its asset or from the folder of an earlier extraction."""
        if path.is_dir():
            return _bind_mhr(self.open("mhr", None, path))
        return _bind_mhr(self.open("mhr", path, None))

    def write(
        self,
        planned: PlannedFile,
        products: Products,
        companions: list[CompanionDigests] | None = None,
    ) -> WrittenFile:
        """Write a file and read it back; it appears with all the others."""
        destination = self._folder / planned.name
        written = write_gguf(planned, products, self._publications, destination, self._progress)
        self._written.append((written, companions or []))
        return written

    def publish(self, model: Model, body: _Body | None, mhr: _Mhr | None) -> Manifest:
        """Write the manifest, then make everything appear."""
        manifest = self._manifest(model, body, mhr)
        path = self._folder / self.request.manifest_path.name
        publication = self._publications.create(path)
        publication.write(encode_document(manifest.to_document(), "manifest"))
        publication.seal()
        self._publications.commit()
        if self._target is not None:
            self._target.appear()
        return manifest

    def _manifest(self, model: Model, body: _Body | None, mhr: _Mhr | None) -> Manifest:
        parts = [part for part in (body, mhr) if part is not None]
        sources = [
            ManifestSource(ROLES[e.model], e.source)
            for e in (part.products.extraction for part in parts)
        ]
        if body is not None:
            sources.insert(1, ManifestSource(CONFIG_ROLE, body.config))
        pinned = all(source.identity.origin == "pinned" for source in sources)
        origin: Origin = "pinned" if pinned else "unpinned"
        numbered = () if mhr is None else mhr.names.numbered
        return Manifest(
            model=model,
            layout=self.request.layout,
            precision=self.request.effective_precision(),
            status="incomplete" if model == "body" and mhr is None else "complete",
            origin=origin,
            native_contract=self._native_contract([part.bound for part in parts]),
            sources=tuple(sources),
            safetensors=tuple(p for part in parts for p in part.products.extraction.products),
            files=self._files(pinned=pinned),
            left_out=tuple(
                item
                for part in parts
                for item in left_out_items(part.products.extraction, part.bound.left_out)
            ),
            notes=tuple(map(numbered_note, numbered)),
        )

    def _files(self, *, pinned: bool) -> tuple[ManifestFile, ...]:
        return tuple(
            manifest_file(written, companions, known_answer(written, pinned=pinned))
            for written, companions in self._written
        )

    def _native_contract(self, bounds: list[BoundContract]) -> NativeContract:
        if self.request.layout == "single":
            return "not applicable"
        official = all(bound.is_official for bound in bounds)
        return "conforms" if official else "does not conform: other dimensions"

    def _kept_folder(self, model: Model) -> Path | None:
        """Where this model's safetensors are kept: MHR's below Body's, if both are converted."""
        folder = self.request.keep_safetensors
        if folder is None:
            return None
        self._stack.enter_context(_folder_if_absent(folder))
        if model == "mhr" and self.request.mhr is not None:
            folder = folder / KEPT_MHR
            self._stack.enter_context(_folder_if_absent(folder))
        return folder

    def _scratch(self, place: Path) -> Path:
        return self._stack.enter_context(scratch_in(place))


@contextlib.contextmanager
def _folder_if_absent(path: Path) -> Generator[None]:
    """Make a folder unless it exists, and remove it again if nothing has appeared in it."""
    if path.is_dir():
        yield
        return
    try:
        path.mkdir()
    except OSError as error:
        raise output_error(error, path) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()

"""From a legacy file to verified safetensors: sandboxed reading, then the host's own check.

    with scratch_folder(out.parent) as folder, extract("body", checkpoint, folder) as result:
        result.extraction.products[0].sha256

Nothing of the legacy file is parsed outside of the sandbox but its first bytes and zip directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sam3d_gguf.extractors.classify import classify
from sam3d_gguf.extractors.extraction import (
    AddedTensor,
    ArchiveFacts,
    ExtractedProduct,
    ExtractedTensor,
    Extraction,
    KnownAnswer,
    Origin,
    SourceIdentity,
    display_name,
    known_products,
)
from sam3d_gguf.extractors.files import OpenedFile, open_source
from sam3d_gguf.extractors.hashing import hash_file
from sam3d_gguf.extractors.kinds import CHECKPOINTS, FileKind
from sam3d_gguf.extractors.models import OBJECTS, ROLES, Model
from sam3d_gguf.extractors.products import Product, SourceTensor, plan_products, product_files
from sam3d_gguf.extractors.progress import QUIET, Progress
from sam3d_gguf.extractors.publication import settle
from sam3d_gguf.extractors.recheck import Maker, ProductDigests, digest_product, recheck
from sam3d_gguf.extractors.sandbox.job import SandboxChoice, SandboxLimits, WorkerJob, WorkerResult
from sam3d_gguf.extractors.sandbox.run import run_worker
from sam3d_gguf.extractors.scratch import full_disk, make_outputs
from sam3d_gguf.extractors.sniff import require_source
from sam3d_gguf.extractors.tensor_ref import TensorRef
from sam3d_gguf.extractors.worker import REFUSED, largest_product, output_files
from sam3d_gguf.extractors.worker_report import ERROR, MAX_BYTES, REPORT, WorkerReport, decode
from sam3d_gguf.manifests.known_answers import load_known_answers
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.errors import InputError, SandboxError
from sam3d_gguf.schemas.strict_json import load_file

_SAVED = frozenset({FileKind.TORCH_ZIP, FileKind.TORCH_LEGACY})
KINDS: Mapping[Model, frozenset[FileKind]] = {
    "body": _SAVED,
    "mhr": frozenset({FileKind.TORCHSCRIPT}),
    **dict.fromkeys(OBJECTS, _SAVED),
}
_WORKER_NAME = "the file"


@dataclass(frozen=True, slots=True)
class Extracted:
    """Verified product files and the legacy file, open, and the report on them.

    `refs` say where each tensor lies in the legacy file, by its name there; `sandbox` names what
    read it.
    """

    extraction: Extraction
    files: Mapping[str, OpenedFile]
    source: OpenedFile
    refs: Mapping[str, TensorRef]
    sandbox: str


@contextlib.contextmanager
def extract(
    model: Model,
    path: Path,
    folder: Path,
    *,
    sandbox: SandboxChoice | None = None,
    allow_unpinned: bool = False,
    keep: bool = False,
    progress: Progress = QUIET,
) -> Generator[Extracted]:
    """Read a legacy file in the sandbox and check what came out; the files are open in the block.

    Args:
        model: what the file is to be.
        path: a TorchScript archive ("mhr"), else a torch.save checkpoint.
        folder: an empty private folder on a file system with room for the products.
        sandbox: bubblewrap unless said otherwise.
        allow_unpinned: accept a file that this tool has no pin for.
        keep: force the product files to the disk before they are checked, so that
            `PublicationSet.adopt` may take them.

    Raises:
        InputError: the file is of another kind, malformed, not pinned, changed while it was read,
            or gave products that are not those published.
        SandboxError: the sandbox is missing or ended the reader.
        OutputError: there is no space for what the reader writes.
    """
    with open_source(path) as source, contextlib.ExitStack() as stack:
        require_model(model, source)
        require_possible_pin(model, source, allow_unpinned)
        task = ("extract", model)
        identity, report, result = _read(model, source, folder, task, sandbox, progress)
        if identity.origin == "unpinned" and not allow_unpinned:
            raise _unpinned(model, source, f"its SHA-256 is {identity.sha256}")
        files = {
            name: stack.enter_context(open_source(folder / name)) for name in product_files(model)
        }
        if keep:
            for file in files.values():
                settle(file.fd)
        compare = _comparison(source, report, files, progress, "reader")
        checked = _check(source, identity, _planned(model, report), compare)
        extraction = _extraction(model, identity, report, checked)
        yield Extracted(extraction, files, source, report.tensors, result.sandbox)


@dataclass(frozen=True, slots=True)
class Located:
    """A legacy file that stays open, the report on it, and where each tensor lies in it.

    The report's safetensors files are hashed but not written. `refs` are by the tensors' names in
    the source.
    """

    extraction: Extraction
    source: OpenedFile
    refs: Mapping[str, TensorRef]
    sandbox: str


@contextlib.contextmanager
def locate(
    model: Model,
    path: Path,
    folder: Path,
    *,
    sandbox: SandboxChoice | None = None,
    allow_unpinned: bool = False,
    progress: Progress = QUIET,
) -> Generator[Located]:
    """Read a legacy file in the sandbox, and hash the products that `extract` would write.

    The reader says where tensors lie; the bytes are taken from the file by the host itself. See
    `extract` for arguments and errors.
    """
    with open_source(path) as source:
        require_model(model, source)
        require_possible_pin(model, source, allow_unpinned)
        identity, report, result = _read(model, source, folder, ("check",), sandbox, progress)
        if identity.origin == "unpinned" and not allow_unpinned:
            raise _unpinned(model, source, f"its SHA-256 is {identity.sha256}")
        planned = _planned(model, report)

        def digest(product: Product) -> ProductDigests:
            return digest_product(source.source, report.tensors, product, progress.advance)

        total = sum(tensor.nbytes for tensor in report.tensors.values())
        progress.stage("Hash the tensors and the source again", total)
        checked = _check(source, identity, planned, digest)
        extraction = _extraction(model, identity, report, checked)
        yield Located(extraction, source, report.tensors, result.sandbox)


def reread(
    stated: Extraction,
    path: Path,
    folder: Path,
    files: Mapping[str, OpenedFile],
    *,
    sandbox: SandboxChoice | None = None,
    progress: Progress = QUIET,
) -> Extraction:
    """Check an extraction that lies on disk against its source: names, places and every byte.

    Args:
        stated: what its report says.
        path: the legacy file.
        folder: an empty private folder.
        files: the product files, open.

    Returns:
        the extraction as it follows from the source.

    Raises:
        InputError: the source is another one, or gives something else.
    """
    with open_source(path) as source:
        identity, report, _ = _read(stated.model, source, folder, ("inspect",), sandbox, progress)
        if identity.sha256 != stated.source.sha256:
            raise InputError(
                f"this is not the extraction's source: its SHA-256 is {identity.sha256}",
                where=str(path),
                expected=stated.source.sha256,
            )
        planned = _planned(stated.model, report)
        compare = _comparison(source, report, files, progress, "extraction")
        checked = _check(source, identity, planned, compare)
        found = _extraction(stated.model, identity, report, checked)
    if (found.tensors, found.attributes) != (stated.tensors, stated.attributes):
        raise InputError("the source gives another report than the extraction's", where=str(path))
    return found


def inspect_legacy(
    path: Path,
    folder: Path,
    *,
    sandbox: SandboxChoice | None = None,
    progress: Progress = QUIET,
) -> tuple[SourceIdentity, WorkerReport]:
    """Read a legacy file of any model in the sandbox, and report what it holds.

    Raises:
        InputError: the file is of another kind or malformed.
        SandboxError: the sandbox is missing or ended the reader.
    """
    with open_source(path) as source:
        identity, report, _ = _read(None, source, folder, ("inspect",), sandbox, progress)
        source.assert_unchanged()
        return identity, report


def _planned(model: Model, report: WorkerReport) -> tuple[Product, ...]:
    tensors = [SourceTensor(t.name, t.dtype, t.shape) for t in report.tensors.values()]
    return plan_products(model, tensors)


def require_model(model: Model | None, source: OpenedFile) -> FileKind:
    """Return the kind of a legacy file, which must be one of the model's (None: of any).

    Raises:
        InputError: it is of another kind.
    """
    return require_source(source.source, CHECKPOINTS if model is None else KINDS[model])


def is_possible_pin(model: Model, source: OpenedFile) -> bool:
    """Whether a pinned legacy file of the model has that size."""
    return source.size in {pin.bytes for pin in load_sources().with_role(ROLES[model])}


def require_possible_pin(model: Model, source: OpenedFile, allow_unpinned: bool) -> None:
    """Refuse, unless it is allowed, a file that has another size than those that are pinned.

    Raises:
        InputError: it has.
    """
    if not is_possible_pin(model, source) and not allow_unpinned:
        raise _unpinned(model, source, f"it has {source.size} bytes")


def _unpinned(model: Model, source: OpenedFile, found: str) -> InputError:
    pins = load_sources().with_role(ROLES[model])
    known = "; or ".join(
        f"{pin.path} of {pin.repository} ({pin.bytes} bytes, SHA-256 {pin.sha256})" for pin in pins
    )
    if not pins:
        known = "one whose SHA-256 this tool knows, and it knows none"
    return InputError(
        f"this is not a pinned {ROLES[model]}: {found}",
        where=str(source.path),
        expected=known,
        action="Fetch the official file again, or accept this one with --allow-unpinned",
    )


def _origin(model: Model | None, source: OpenedFile, sha256: str) -> Origin:
    pin = load_sources().find(sha256=sha256, size=source.size)
    known = pin is not None and (model is None or pin.role == ROLES[model])
    return "pinned" if known else "unpinned"


def _read(
    model: Model | None,
    source: OpenedFile,
    folder: Path,
    task: tuple[str, ...],
    sandbox: SandboxChoice | None,
    progress: Progress,
) -> tuple[SourceIdentity, WorkerReport, WorkerResult]:
    """Hash the source, while the sandboxed reader is at work on it."""
    kind = require_model(model, source)
    make_outputs(folder, output_files(task))
    job = WorkerJob(
        source_fd=source.fd,
        source_path=source.path,
        output=folder,
        arguments=task,
        limits=SandboxLimits(file_bytes=largest_product(source.size)),
    )
    progress.stage(f"Read {source.path.name} in the sandbox", source.size)
    with ThreadPoolExecutor(1) as executor:
        before = executor.submit(hash_file, source.source, progress=progress.advance)
        result = run_worker(job, sandbox or SandboxChoice())
        sha256 = before.result().sha256
    origin = _origin(model, source, sha256)
    identity = SourceIdentity(display_name(source.path), source.size, sha256, origin)
    return identity, _report(source, kind, folder, result), result


def _report(source: OpenedFile, kind: FileKind, folder: Path, result: WorkerResult) -> WorkerReport:
    name = source.source.name
    if result.exit_status == REFUSED and result.ended_by is None:
        fault: Any = load_file(folder / ERROR, schema="worker-error")
        where = name + fault["where"].removeprefix(_WORKER_NAME) if fault["where"] else name
        raise InputError(
            fault["what"], where=where, expected=fault["expected"], action=fault["action"]
        )
    if result.ended_by == "disk space":
        raise full_disk(folder, source, kind)
    result.raise_for_end(where=name)
    if result.exit_status != 0:
        tail = result.stderr.strip().splitlines()[-1:] or ["it says nothing"]
        raise SandboxError(f"the sandboxed reader failed: {tail[0][:500]}", where=name)
    document = load_file(folder / REPORT, schema="worker", max_bytes=MAX_BYTES)
    return decode(document, source.source, kind)


def _comparison(
    source: OpenedFile,
    report: WorkerReport,
    files: Mapping[str, OpenedFile],
    progress: Progress,
    maker: Maker,
) -> Callable[[Product], ProductDigests]:
    """The check of product files that lie on disk against the source."""
    progress.stage("Check every byte against the source", sum(f.size for f in files.values()))

    def compare(product: Product) -> ProductDigests:
        file = files[product.file].source
        return recheck(source.source, report.tensors, product, file, progress.advance, maker=maker)

    return compare


def _check(
    source: OpenedFile,
    identity: SourceIdentity,
    planned: tuple[Product, ...],
    check: Callable[[Product], ProductDigests],
) -> list[tuple[Product, ProductDigests]]:
    """Check the products, and hold the source to what it was before."""
    with ThreadPoolExecutor(1) as executor:
        after = executor.submit(hash_file, source.source)
        checked = [(product, check(product)) for product in planned]
        source.assert_unchanged()
        if after.result().sha256 != identity.sha256:
            raise InputError(
                "the file was changed while it was read",
                where=source.source.name,
                action="Wait until the file is complete, then try again",
            )
    return checked


def _extraction(
    model: Model,
    source: SourceIdentity,
    report: WorkerReport,
    checked: list[tuple[Product, ProductDigests]],
) -> Extraction:
    tensors: list[ExtractedTensor] = []
    added: list[AddedTensor] = []
    for product, digests in checked:
        for t in product.tensors:
            if t.source is None:
                sha256 = digests.tensors[t.name]
                added.append(AddedTensor(product.file, t.name, t.dtype, t.shape, t.reason, sha256))
                continue
            ref = report.tensors[t.source.name]
            tensors.append(
                ExtractedTensor(
                    name=ref.name,
                    file=product.file,
                    target=t.name,
                    cls=classify(model, ref.name),
                    source_dtype=ref.dtype,
                    dtype=t.dtype,
                    shape=t.shape,
                    member=ref.storage.member,
                    offset=ref.storage_offset,
                    strides=ref.strides,
                    sha256=digests.tensors.get(t.name),
                )
            )
    pinned = source.origin == "pinned"
    if pinned and model == "mhr":
        _require_known_tensors(tensors)
    return Extraction(
        model=model,
        source=source,
        archive=ArchiveFacts(
            report.kind.name, report.wrapper, report.root, report.code, report.globals
        ),
        products=tuple(_product(product, digests, pinned) for product, digests in checked),
        tensors=tuple(tensors),
        added=tuple(added),
        shared_storages=report.shared,
        left_out=report.left_out,
        attributes=report.attributes,
        inert=report.inert,
    )


def _product(product: Product, digests: ProductDigests, pinned: bool) -> ExtractedProduct:
    known = known_products().get(product.file) if pinned else None
    if known is not None and known != (digests.bytes, digests.sha256):
        raise InputError(
            f"the file made from the pinned source has {digests.bytes} bytes and SHA-256 "
            f"{digests.sha256}",
            where=product.file,
            expected=f"the published {known[0]} bytes and SHA-256 {known[1]}",
            action="Report this: the source is official, so the reader is wrong",
        )
    answer: KnownAnswer = "none" if known is None else "equal"
    return ExtractedProduct(
        product.file, digests.bytes, digests.sha256, len(product.tensors), answer
    )


def _require_known_tensors(tensors: list[ExtractedTensor]) -> None:
    found = {t.name: (t.dtype, t.shape, t.sha256) for t in tensors}
    for known in load_known_answers().mhr_tensors.values():
        if found.get(known.name) != (known.dtype, known.shape, known.sha256):
            raise InputError(
                f"the tensor {known.name!r} of the pinned source is not the published one",
                where="mhr.safetensors",
                expected=f"{known.dtype} {list(known.shape)} with SHA-256 {known.sha256}",
                action="Report this: the source is official, so the reader is wrong",
            )

"""SAM 3D Objects: its checkpoints in; one GGUF for each part and their manifest out, in a new folder.

    manifest = convert_objects(ObjectsRequest(Path("checkpoints"), out=Path("objects")))

Every file names the parts of its release that its contract says, by their digests, so that parts of
two releases can't be mixed unnoticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sam3d_gguf.convert.binding import BoundContract, Precision
from sam3d_gguf.convert.config import Config, check_config
from sam3d_gguf.convert.contract import load_model_contract
from sam3d_gguf.convert.files import single_file
from sam3d_gguf.convert.manifest import (
    Manifest,
    ManifestFile,
    ManifestLeftOut,
    ManifestSource,
    left_out_items,
    manifest_file,
)
from sam3d_gguf.convert.metadata import CompanionDigests
from sam3d_gguf.convert.plan import stored_once
from sam3d_gguf.convert.products import (
    SourceProducts,
    kept_products_from_source,
    products_from_source,
    specs,
)
from sam3d_gguf.convert.request import MANIFEST_NAME, open_config
from sam3d_gguf.convert.stream import write_gguf
from sam3d_gguf.convert.verify_manifest import is_complete
from sam3d_gguf.extractors.extract import require_model, require_possible_pin
from sam3d_gguf.extractors.extraction import ExtractedProduct, Extraction, SourceIdentity
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.extractors.models import (
    CONFIG_ROLES,
    MOGE,
    OBJECTS,
    PIPELINE_ROLE,
    ROLES,
    Model,
    part,
)
from sam3d_gguf.extractors.new_folder import new_folder
from sam3d_gguf.extractors.progress import QUIET, Progress
from sam3d_gguf.extractors.publication import PublicationSet
from sam3d_gguf.extractors.sandbox.job import SandboxChoice
from sam3d_gguf.extractors.sandbox.run import require_sandbox
from sam3d_gguf.extractors.scratch import scratch_in
from sam3d_gguf.schemas.documents import encode_document
from sam3d_gguf.schemas.errors import ContractError, InputError
from sam3d_gguf.schemas.strict_json import JsonValue

PIPELINE_NAME = "pipeline.yaml"
_PATCH = 14


@dataclass(frozen=True, slots=True)
class ObjectsRequest:
    """What to extract or convert, to where.

    Attributes:
        checkpoint_dir: holds the parts' checkpoints, their configurations and `pipeline.yaml`.
        out: a folder that doesn't exist yet.
        parts: the parts' names; by default all in `checkpoint_dir`, and the depth model if given.
        moge: the depth model's file.
        precision: "source" or "f32".
        allow_unpinned: accept sources that this tool has no pin for.
        sandbox: what reads legacy files.
    """

    checkpoint_dir: Path
    out: Path
    parts: tuple[str, ...] | None = None
    moge: Path | None = None
    precision: Precision = "source"
    allow_unpinned: bool = False
    sandbox: SandboxChoice = field(default_factory=SandboxChoice)

    def models(self) -> list[Model]:
        """The parts that are asked for, each after those that its file names.

        Raises:
            InputError: a part is unknown or named twice, there is none, or the depth model's file
                is missing or not asked for.
        """
        names = list(self.parts) if self.parts is not None else [part(m) for m in OBJECTS]
        if self.parts is None and self.moge is None:
            names.remove(part(MOGE))
        known = [part(model) for model in OBJECTS]
        for name in names:
            if name not in known or names.count(name) > 1:
                fault = "is named twice" if name in known else "is unknown"
                raise InputError(
                    f"the part {name[:80]!r} {fault}", where="--parts", expected=", ".join(known)
                )
        if not names:
            raise InputError("no part is named", where="--parts", expected=", ".join(known))
        if (part(MOGE) in names) != (self.moge is not None):
            raise InputError(
                "the depth model moge needs its file, and its file needs the part",
                action="Give --moge PATH, and name moge in --parts if parts are named",
            )
        wanted: list[Model] = [model for model in OBJECTS if part(model) in names]
        return sorted(wanted, key=lambda model: len(load_model_contract(model).companions))

    def checkpoint(self, model: Model) -> Path:
        """Where the legacy file of a part lies."""
        if model == MOGE and self.moge is not None:
            return self.moge
        return self.checkpoint_dir / f"{part(model)}.ckpt"


@dataclass(slots=True)
class _Release:
    """What has been read and written so far."""

    sources: list[ManifestSource] = field(default_factory=list[ManifestSource])
    safetensors: list[ExtractedProduct] = field(default_factory=list[ExtractedProduct])
    files: list[ManifestFile] = field(default_factory=list[ManifestFile])
    left_out: list[ManifestLeftOut] = field(default_factory=list[ManifestLeftOut])
    bounds: dict[str, BoundContract] = field(default_factory=dict[str, BoundContract])

    def companions(self, bound: BoundContract) -> tuple[CompanionDigests, ...]:
        """The files that are written already and that a part names.

        Raises:
            ContractError: they have another size of something that must be equal.
        """
        written = {file.role: file for file in self.files}
        found: list[CompanionDigests] = []
        for companion in bound.contract.companions:
            file = written.get(companion.role)
            if file is None:
                continue
            other = self.bounds[companion.role]
            for name in companion.equal_dimensions:
                if bound.dims[name] != other.dims[name]:
                    raise ContractError(
                        f"the parts don't belong together: {name} is {bound.dims[name]} in "
                        f"{bound.contract.name} and {other.dims[name]} in {companion.role}"
                    )
            digests = (file.architecture, file.content_sha256, file.semantics_sha256)
            found.append(CompanionDigests(companion.role, *digests))
        return tuple(found)

    def manifest(self, precision: Precision) -> Manifest:
        """The manifest of what was written."""
        pinned = all(source.identity.origin == "pinned" for source in self.sources)
        models: list[Model] = [model for model in OBJECTS if model in self.bounds]
        return Manifest(
            model="objects",
            layout="single",
            precision=precision,
            status="complete" if is_complete(models) else "incomplete",
            origin="pinned" if pinned else "unpinned",
            native_contract="not applicable",
            sources=tuple(self.sources),
            safetensors=tuple(self.safetensors),
            files=tuple(self.files),
            left_out=tuple(self.left_out),
            notes=(),
        )


def convert_objects(request: ObjectsRequest, progress: Progress = QUIET) -> Manifest:
    """Convert the parts of SAM 3D Objects.

    Raises:
        InputError: a part is missing, of the wrong kind, malformed, not pinned, or changed meanwhile.
        ContractError: tensors, values or a configuration don't meet the contract, or parts don't
            belong together.
        SandboxError: the sandbox is missing, or ended its reader.
        OutputError: the folder exists, or can't be written.
    """
    models = request.models()
    with new_folder(request.out) as target, PublicationSet() as publications:
        _require_acceptable(request, models)
        pipeline = _open_config(request, PIPELINE_NAME, PIPELINE_ROLE, "objects-pipeline-config")
        configs = {model: _read_config(request, model) for model in models if model != MOGE}
        release = _Release([ManifestSource(PIPELINE_ROLE, pipeline[1])])
        for model in models:
            config = configs.get(model)
            with contextlib.ExitStack() as stack:
                scratch = stack.enter_context(scratch_in(request.out.absolute().parent))
                products = stack.enter_context(
                    products_from_source(
                        model,
                        request.checkpoint(model),
                        scratch,
                        sandbox=request.sandbox,
                        allow_unpinned=request.allow_unpinned,
                        progress=progress,
                    )
                )
                bound = _bind(products, config, pipeline)
                companions = release.companions(bound)
                planned = single_file(
                    products.extraction,
                    bound,
                    f"{part(model)}.gguf",
                    request.precision,
                    config=None if config is None else config[1],
                    pipeline=pipeline[1],
                    companions=companions,
                )
                place = target.unfinished / planned.name
                written = write_gguf(planned, products, publications, place, progress)
            release.files.append(manifest_file(written, companions, "none"))
            release.bounds[model] = bound
            extraction = products.extraction
            release.sources.append(ManifestSource(ROLES[model], extraction.source))
            if config is not None:
                release.sources.append(ManifestSource(CONFIG_ROLES[model], config[1]))
            release.safetensors += extraction.products
            release.left_out += left_out_items(extraction, bound.left_out)
        manifest = release.manifest(request.precision)
        publication = publications.create(target.unfinished / MANIFEST_NAME)
        publication.write(encode_document(manifest.to_document(), "manifest"))
        publication.seal()
        publications.commit()
        target.appear()
        return manifest


def extract_objects(
    request: ObjectsRequest, progress: Progress = QUIET
) -> Mapping[Model, Extraction]:
    """Extract the parts of SAM 3D Objects: for each a folder of safetensors and `extraction.json`.

    Raises:
        InputError: a part is missing, of the wrong kind, malformed, not pinned, or changed meanwhile.
        SandboxError: the sandbox is missing, or ended its reader.
        OutputError: the folder exists, or can't be written.
    """
    models = request.models()
    done: dict[Model, Extraction] = {}
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(new_folder(request.out))
        publications = stack.enter_context(PublicationSet())
        _require_acceptable(request, models)
        for model in models:
            scratch = stack.enter_context(scratch_in(request.out.absolute().parent))
            products = stack.enter_context(
                kept_products_from_source(
                    model,
                    request.checkpoint(model),
                    scratch,
                    sandbox=request.sandbox,
                    allow_unpinned=request.allow_unpinned,
                    progress=progress,
                )
            )
            folder = target.unfinished / part(model)
            folder.mkdir()
            products.publish(publications, folder)
            done[model] = products.extraction
        publications.commit()
        target.appear()
    return done


def _require_acceptable(request: ObjectsRequest, models: list[Model]) -> None:
    """Refuse what can be known to be wrong before anything large is read."""
    if not request.checkpoint_dir.is_dir():
        raise InputError(
            "this is no folder",
            where=str(request.checkpoint_dir),
            expected="the folder of the checkpoints, their YAML files and pipeline.yaml",
        )
    for model in models:
        with open_source(request.checkpoint(model)) as source:
            require_model(model, source)
            require_possible_pin(model, source, request.allow_unpinned)
    require_sandbox(request.sandbox)


_Config = tuple[Config, SourceIdentity]


def _open_config(request: ObjectsRequest, name: str, role: str, schema: str) -> _Config:
    path = request.checkpoint_dir / name
    return open_config(path, role, schema, allow_unpinned=request.allow_unpinned)


def _read_config(request: ObjectsRequest, model: Model) -> _Config:
    name = part(model)
    schema = name.removesuffix("_4").replace("_", "-")
    return _open_config(request, f"{name}.yaml", CONFIG_ROLES[model], f"objects-{schema}-config")


def _bind(products: SourceProducts, config: _Config | None, pipeline: _Config) -> BoundContract:
    """The contract of a part with all its numbers, equal tensors stored once."""
    extraction = products.extraction
    source = extraction.source
    own = _moge_config(extraction) if config is None else config[0]
    identities = [source, pipeline[1], *(() if config is None else (config[1],))]
    contract = load_model_contract(extraction.model)
    bound = contract.bind(
        specs(products),
        replace(own, values={**own.values, "pipeline": dict(pipeline[0].values)}),
        official=all(identity.origin == "pinned" for identity in identities),
        where=source.name,
    )
    return bound.sharing(stored_once(contract, extraction))


def _moge_config(extraction: Extraction) -> Config:
    """The configuration in the depth model's file, an older form of it in today's."""
    where = f"{extraction.source.name}: model_config"
    stated = extraction.attributes.get("model_config")
    if not isinstance(stated, dict):
        raise InputError("there is none beside the tensors", where=where)
    values: dict[str, JsonValue] = {**stated}
    area = values.pop("trained_area_range", None)
    if isinstance(area, list):
        values["num_tokens_range"] = [
            item // _PATCH**2 if isinstance(item, int) else item for item in area
        ]
    values.setdefault("num_tokens_range", [1200, 2500])
    return check_config(values, "objects-moge-config", where=where)

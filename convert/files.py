"""The files of a release as plans: single files, and the native runtime's components."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sam3d_gguf.convert.binding import BoundContract, Precision
from sam3d_gguf.convert.contract_types import TensorSpec
from sam3d_gguf.convert.gguf_format import GgufValue, string, uint32
from sam3d_gguf.convert.metadata import (
    CompanionDigests,
    Provenance,
    semantics_metadata,
    single_metadata,
)
from sam3d_gguf.convert.mhr_names import MhrNames
from sam3d_gguf.convert.native import load_native_components
from sam3d_gguf.convert.plan import PlannedFile, plan_component, plan_single
from sam3d_gguf.convert.stream import WrittenFile
from sam3d_gguf.extractors.extraction import Extraction, KnownAnswer, SourceIdentity
from sam3d_gguf.extractors.models import Model
from sam3d_gguf.manifests.known_answers import KnownFile, load_known_answers
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.errors import ContractError, InputError

COMPONENT_FILES: Mapping[str, str] = {
    "mhr.lod1": "mhr-lod1.gguf",
    "body.dinov3_backbone": "body-dinov3-backbone.gguf",
    "body.pose_branch": "body-pose-branch.gguf",
}


def single_file(
    extraction: Extraction,
    bound: BoundContract,
    name: str,
    precision: Precision,
    *,
    config: SourceIdentity | None = None,
    pipeline: SourceIdentity | None = None,
    names: MhrNames | None = None,
    companions: Iterable[CompanionDigests] = (),
) -> PlannedFile:
    """The single-file GGUF of a model; see `Provenance`, `names` are MHR's."""
    provenance = Provenance(
        model=extraction.model,
        source=extraction.source,
        safetensors={product.file: product.sha256 for product in extraction.products},
        precision=precision,
        config=config,
        pipeline=pipeline,
        companions=tuple(companions),
        numbered=() if names is None else names.numbered,
    )
    semantics = semantics_metadata(bound, names)
    metadata = single_metadata(provenance, semantics, bound.contract.architecture)
    tensors = plan_single(extraction, bound, precision)
    return PlannedFile(
        extraction.model, name, bound, metadata, semantics, tensors, carries_digests=True
    )


def component_file(
    component: str,
    extraction: Extraction,
    bound: BoundContract,
    values: Mapping[str, str | int],
    names: MhrNames | None = None,
) -> PlannedFile:
    """A component of the native contract; `values` fill its templates.

    Its semantics are those that the file alone gives: a component has no dimensions of other parts.
    """
    native = load_native_components()[component]
    rendered = native.render({**bound.dims, **values})
    tensors = plan_component(extraction, bound, native)
    specs = {name: TensorSpec(t.spec.type.name, t.spec.shape) for name, t in tensors.items()}
    part = native.bind(specs, native.dimensions(native.read(rendered)), where=component)
    return PlannedFile(
        component,
        COMPONENT_FILES[component],
        bound,
        {key: _native_value(value) for key, value in rendered.items()},
        semantics_metadata(part, names),
        tensors,
        carries_digests=False,
    )


def body_component_values(
    extraction: Extraction, config: SourceIdentity, mhr: Extraction | None, component: str
) -> dict[str, str | int]:
    """What the templates of a Body component stand for.

    Raises:
        InputError: the MHR asset that belongs to an unpinned model is not given.
    """
    sources = load_sources()
    product = "backbone" if component == "body.dinov3_backbone" else "other"
    (safetensors,) = (p for p in extraction.products if p.file == f"{product}.safetensors")
    source = extraction.source
    require_asset(given=mhr is not None, pinned=source.origin == "pinned", where=source.name)
    asset = sources.with_role("mhr.asset")[0].sha256 if mhr is None else mhr.source.sha256
    return {
        **known_values(),
        "checkpoint_sha256": extraction.source.sha256,
        "config_sha256": config.sha256,
        "safetensors_sha256": safetensors.sha256,
        "mhr_asset_sha256": asset,
    }


def require_asset(*, given: bool, pinned: bool, where: str) -> None:
    """Refuse components of a Body model whose MHR asset is neither given nor known.

    Raises:
        InputError: it is neither.
    """
    if not given and not pinned:
        raise InputError(
            "the components of an unpinned Body model name the MHR asset that they need",
            where=where,
            action="Give it with --mhr PATH",
        )


def known_values() -> dict[str, str]:
    """What stands in every component, whatever it was made from: this tool's own pins."""
    sources = load_sources()
    (release,) = sources.releases
    return {
        "body_revision": sources.source_revisions["facebookresearch/sam-3d-body"],
        "dinov3_revision": sources.source_revisions["facebookresearch/dinov3"],
        "release_sha256": release.archive.sha256,
    }


def mhr_component_values(extraction: Extraction, names: MhrNames) -> dict[str, str | int]:
    """What the templates of the MHR component stand for.

    For the pinned asset, the safetensors hash is that of the published reference extraction (the
    same tensors in another order): the published hash of the component covers it.
    """
    (product,) = extraction.products
    pinned = extraction.source.origin == "pinned"
    reference = load_known_answers().mhr_reference_safetensors_sha256
    return {
        **known_values(),
        "asset_sha256": extraction.source.sha256,
        "safetensors_sha256": reference if pinned else product.sha256,
        "prefix_sizes": ",".join(map(str, names.prefix_sizes)),
        "joint_names": ",".join(names.joints),
        "parameter_names": ",".join(names.parameters),
    }


def known_answer(written: WrittenFile, *, pinned: bool) -> KnownAnswer:
    """Whether a published hash confirms a file; only those of pinned sources have one.

    Raises:
        ContractError: there is one, and the file is another.
    """
    known = known_components().get(written.planned.role) if pinned else None
    if known is None:
        return "none"
    found = (written.sealed.size, written.sealed.sha256)
    if found != (known.bytes, known.sha256):
        raise ContractError(
            f"the file made from the pinned source has {found[0]} bytes and SHA-256 {found[1]}",
            where=written.planned.name,
            expected=f"the published {known.bytes} bytes and SHA-256 {known.sha256}",
            action="Report this: the source is official, so the converter is wrong",
        )
    return "equal"


def component_sources(component: str) -> tuple[Model, str]:
    """The model that a component is of, and the template that names its legacy file."""
    return ("mhr", "asset_sha256") if component == "mhr.lod1" else ("body", "checkpoint_sha256")


def known_components() -> dict[str, KnownFile]:
    """The components that have a published size and SHA-256."""
    answers = load_known_answers()
    return {
        "body.dinov3_backbone": answers.body_backbone_gguf,
        "body.pose_branch": answers.body_pose_branch_gguf,
        "mhr.lod1": answers.mhr_gguf,
    }


def _native_value(value: str | int) -> GgufValue:
    return uint32(value) if isinstance(value, int) else string(value)

"""The metadata of single-file GGUFs: the standard keys, provenance, and what changes results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sam3d_gguf.convert.binding import BoundContract, Precision
from sam3d_gguf.convert.contract import load_model_contract
from sam3d_gguf.convert.contract_types import Semantics
from sam3d_gguf.convert.gguf_format import (
    GgufValue,
    ValueType,
    array,
    boolean,
    float32,
    string,
    uint32,
    uint64,
)
from sam3d_gguf.convert.mhr_names import MhrNames
from sam3d_gguf.extractors.extraction import SourceIdentity
from sam3d_gguf.extractors.models import OBJECTS, ROLES, Model
from sam3d_gguf.manifests.sources import load_sources

SCHEMA_VERSION = 1
CONFIG_KEY = "sam3d.source.config"
PIPELINE_KEY = "sam3d.source.pipeline"
COMPANION_PREFIX = "sam3d.companion."
NUMBERED_KEY = "sam3d.mhr.numbered"
_TENSOR_LAYOUT = "torch_contiguous; ggml_dimensions_reversed; no_data_transpose"
_CHANNELS_LAST = "torch_contiguous; ggml_dimensions_reversed; channels_last_as_the_contract_says"
_ALIGNMENT = 32
# llama.cpp's numbers for general.file_type, which viewers show: ALL_F32, MOSTLY_F16, MOSTLY_BF16.
_FILE_TYPES: Mapping[tuple[str, Precision], int] = {
    ("body", "source"): 32,
    ("objects.ss_decoder", "source"): 1,
    ("objects.slat_decoder_gs", "source"): 1,
    ("objects.slat_decoder_gs_4", "source"): 1,
}
_TITLES: Mapping[Model, str] = {
    "body": "SAM 3D Body DINOv3-H+",
    "mhr": "Momentum Human Rig (MHR) LOD1",
    "objects.ss_generator": "SAM 3D Objects sparse structure generator",
    "objects.slat_generator": "SAM 3D Objects structured latent generator",
    "objects.ss_decoder": "SAM 3D Objects sparse structure decoder",
    "objects.slat_decoder_gs": "SAM 3D Objects Gaussian decoder (32 a voxel)",
    "objects.slat_decoder_gs_4": "SAM 3D Objects Gaussian decoder (4 a voxel)",
    "objects.slat_decoder_mesh": "SAM 3D Objects mesh decoder",
    "objects.moge": "MoGe ViT-L depth model",
}
# The repository of a model's code, and those whose revisions say what its contract describes.
_CODE: Mapping[Model, tuple[str, ...]] = {
    "body": ("sam-3d-body", "dinov3"),
    "mhr": ("MHR",),
    **dict.fromkeys(OBJECTS, ("sam-3d-objects",)),
}


@dataclass(frozen=True, slots=True)
class CompanionDigests:
    """A file that another must be used with: its role there, and what identifies its content."""

    role: str
    architecture: str
    content_sha256: str
    semantics_sha256: str


def semantics_metadata(bound: BoundContract, names: MhrNames | None = None) -> dict[str, GgufValue]:
    """All metadata that changes results, and that `sam3d.semantics_sha256` covers."""
    values = {item.key: _value(item) for item in bound.semantics()}
    if names is not None:
        values["sam3d.mhr.prefix_sizes"] = array(ValueType.UINT32, names.prefix_sizes)
        values["sam3d.mhr.joint_names"] = array(ValueType.STRING, names.joints)
        values["sam3d.mhr.parameter_names"] = array(ValueType.STRING, names.parameters)
    return values


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the tensors of a single-file GGUF come from, and what they go with.

    Attributes:
        model: "body", "mhr" or a part of Objects.
        source: the legacy file; its base name does not matter here.
        safetensors: SHA-256 (hex) of the canonical safetensors in between, by base name.
        precision: "source" or "f32".
        config: the model configuration's file; Body, and the parts of Objects but MoGe.
        pipeline: the configuration that all parts of Objects share.
        companions: the files that this one must be used with.
        numbered: the lists of names that are mere numbers; MHR only.
    """

    model: Model
    source: SourceIdentity
    safetensors: Mapping[str, str]
    precision: Precision
    config: SourceIdentity | None = None
    pipeline: SourceIdentity | None = None
    companions: tuple[CompanionDigests, ...] = ()
    numbered: tuple[str, ...] = ()

    @property
    def is_pinned(self) -> bool:
        """Whether this tool knows every source."""
        sources = (self.source, self.config, self.pipeline)
        return all(source.origin == "pinned" for source in sources if source is not None)


def single_metadata(
    provenance: Provenance, semantics: Mapping[str, GgufValue], architecture: str
) -> dict[str, GgufValue]:
    """The metadata of a single-file GGUF, but for its digests.

    Args:
        provenance: see there.
        semantics: see `semantics_metadata`.
        architecture: of the model.
    """
    model, source = provenance.model, provenance.source
    pinned = provenance.is_pinned
    file_type = _FILE_TYPES.get((model, provenance.precision), 0)
    values: dict[str, GgufValue] = {
        "general.architecture": string(architecture),
        "general.type": string("model"),
        "general.name": string(_TITLES[model] + ("" if pinned else " (unpinned source)")),
        "general.alignment": uint32(_ALIGNMENT),
        "general.file_type": uint32(file_type),
        "sam3d.schema_version": uint32(SCHEMA_VERSION),
        "sam3d.component": string(model),
        "sam3d.layout": string("single"),
        "sam3d.precision": string(provenance.precision),
        "sam3d.tensor_layout": string(_tensor_layout(model)),
        "sam3d.origin": string("pinned" if pinned else "unpinned"),
        **_source(source_key(model), source),
        **semantics,
    }
    for name, sha256 in provenance.safetensors.items():
        values[safetensors_key(name)] = string(sha256)
    if provenance.config is not None:
        values |= _source(CONFIG_KEY, provenance.config)
    if provenance.pipeline is not None:
        values |= _source(PIPELINE_KEY, provenance.pipeline)
    if pinned:
        values |= _pinned(model, source)
    for companion in provenance.companions:
        prefix = f"{COMPANION_PREFIX}{companion.role}"
        values[f"{prefix}.architecture"] = string(companion.architecture)
        values[f"{prefix}.content_sha256"] = string(companion.content_sha256)
        values[f"{prefix}.semantics_sha256"] = string(companion.semantics_sha256)
    if provenance.numbered:
        values[NUMBERED_KEY] = array(ValueType.STRING, provenance.numbered)
    return values


def _tensor_layout(model: Model) -> str:
    """Whether the data of every tensor is in the source's order."""
    entries = load_model_contract(model).entries
    moved = any(entry.layout == "channels_last" for entry in entries)
    return _CHANNELS_LAST if moved else _TENSOR_LAYOUT


def source_key(model: Model) -> str:
    """The key below which the identity of a model's legacy file stands."""
    return f"sam3d.source.{ROLES[model].split('.')[-1]}"


def safetensors_key(file: str) -> str:
    """The key of the SHA-256 of a canonical safetensors file, by its base name."""
    return f"sam3d.source.safetensors.{file.removesuffix('.safetensors')}_sha256"


def _source(prefix: str, source: SourceIdentity) -> dict[str, GgufValue]:
    return {
        f"{prefix}.sha256": string(source.sha256),
        f"{prefix}.bytes": uint64(source.bytes),
    }


def _pinned(model: Model, source: SourceIdentity) -> dict[str, GgufValue]:
    """What is known of a pinned source, and may be said of no other."""
    sources = load_sources()
    values = {
        "general.organization": "Meta",
        "general.source.repo_url": f"https://github.com/facebookresearch/{_CODE[model][0]}",
        **_license(model),
    }
    pin = sources.find(sha256=source.sha256, size=source.bytes)
    if pin is not None:
        values["sam3d.source.repository"] = pin.repository
        values["sam3d.source.revision"] = pin.revision
    for name in _CODE[model]:
        key = f"sam3d.source.code.{name.lower().replace('-', '_')}_revision"
        values[key] = sources.source_revisions[f"facebookresearch/{name}"]
    return {key: string(value) for key, value in values.items()}


def _license(model: Model) -> dict[str, str]:
    if model == "mhr":
        return {"general.license": "apache-2.0"}
    return {
        "general.license": "other",
        "general.license.name": "sam-license",
        "general.license.link": f"https://github.com/facebookresearch/{_CODE[model][0]}"
        "/blob/main/LICENSE",
    }


def _value(item: Semantics) -> GgufValue:
    value, kind = item.value, item.value_type
    if isinstance(value, tuple):
        return array(ValueType[kind.removesuffix("[]").upper()], value)
    match kind:
        case "string":
            return string(str(value))
        case "bool":
            return boolean(bool(value))
        case "uint32":
            return uint32(int(value))
        case _:
            return float32(float(value))

"""The published sizes and hashes of the conversion of the official artifacts.

>>> load_known_answers().body_backbone_safetensors.bytes
3363078840
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sam3d_gguf.schemas.documents import package_document


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A product: its size and its SHA-256 on the official bytes."""

    bytes: int
    sha256: str
    tensors: int | None = None
    elements: int | None = None


@dataclass(frozen=True, slots=True)
class KnownCheckpoint:
    """Totals of the official Body checkpoint; `elements` is per source dtype."""

    tensors: int
    bytes: int
    elements: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class KnownTensor:
    """A tensor of the official MHR asset; the SHA-256 is of its bytes in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class KnownAnswers:
    """Everything in `known_answers.json`.

    Attributes:
        body_checkpoint: totals of the source.
        body_backbone_safetensors: canonical safetensors of the backbone.
        body_other_safetensors: canonical safetensors of everything else.
        body_backbone_gguf: component `body.dinov3_backbone`.
        body_pose_branch_gguf: component `body.pose_branch`.
        mhr_gguf: component `mhr.lod1`.
        mhr_reference_safetensors_sha256: the reference extraction of the MHR asset, all of whose
            55 state tensors stand in the safetensors library's own order; `mhr_gguf` covers it in
            `sam3d.source.safetensors_sha256`.
        mhr_tensors: single tensors of the MHR asset, by name.
    """

    body_checkpoint: KnownCheckpoint
    body_backbone_safetensors: KnownFile
    body_other_safetensors: KnownFile
    body_backbone_gguf: KnownFile
    body_pose_branch_gguf: KnownFile
    mhr_gguf: KnownFile
    mhr_reference_safetensors_sha256: str
    mhr_tensors: Mapping[str, KnownTensor]


@functools.cache
def load_known_answers() -> KnownAnswers:
    """Returns the known answers that ship with this package."""
    document = package_document(
        "sam3d_gguf.manifests", "known_answers.json", schema_name="known-answers"
    )
    body, mhr = document["body"], document["mhr"]
    checkpoint = body["checkpoint"]
    tensors = (_tensor(entry) for entry in mhr["asset_tensors"])
    return KnownAnswers(
        body_checkpoint=KnownCheckpoint(
            checkpoint["tensors"], checkpoint["bytes"], MappingProxyType(checkpoint["elements"])
        ),
        body_backbone_safetensors=KnownFile(**body["backbone_safetensors"]),
        body_other_safetensors=KnownFile(**body["other_safetensors"]),
        body_backbone_gguf=KnownFile(**body["backbone_gguf"]),
        body_pose_branch_gguf=KnownFile(**body["pose_branch_gguf"]),
        mhr_gguf=KnownFile(**mhr["gguf"]),
        mhr_reference_safetensors_sha256=mhr["reference_safetensors_sha256"],
        mhr_tensors=MappingProxyType({tensor.name: tensor for tensor in tensors}),
    )


def _tensor(entry: Any) -> KnownTensor:
    return KnownTensor(entry["name"], entry["dtype"], tuple(entry["shape"]), entry["sha256"])

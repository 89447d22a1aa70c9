"""The manifest: one document that names a release's sources, files and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from sam3d_gguf.convert.binding import Precision
from sam3d_gguf.convert.contract_types import LeftOut
from sam3d_gguf.convert.metadata import CompanionDigests
from sam3d_gguf.convert.stream import WrittenFile
from sam3d_gguf.extractors.extraction import (
    TOOL,
    ExtractedProduct,
    Extraction,
    KnownAnswer,
    Origin,
    SourceIdentity,
)
from sam3d_gguf.extractors.models import ROLES
from sam3d_gguf.schemas.strict_json import JsonInput, load_file

MAX_BYTES = 64 << 20
Layout: TypeAlias = Literal["single", "components"]
Status: TypeAlias = Literal["complete", "incomplete"]
NativeContract: TypeAlias = Literal[
    "conforms", "does not conform: other dimensions", "not applicable"
]


@dataclass(frozen=True, slots=True)
class ManifestTensor:
    """A tensor of a file: GGUF type, PyTorch shape, SHA-256 (hex) of its bytes."""

    name: str
    type: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A GGUF file of a release; `known_answer` says whether its SHA-256 is a published one."""

    name: str
    role: str
    architecture: str
    bytes: int
    sha256: str
    known_answer: KnownAnswer
    content_sha256: str
    semantics_sha256: str
    companions: tuple[CompanionDigests, ...]
    tensors: tuple[ManifestTensor, ...]


@dataclass(frozen=True, slots=True)
class ManifestSource:
    """A file that the release was made from, and what it was there."""

    role: str
    identity: SourceIdentity


@dataclass(frozen=True, slots=True)
class ManifestLeftOut:
    """Something of a source that no file of the release holds."""

    role: str
    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`; `document_schemas/manifest.schema.json` is its form.

    Attributes:
        model: "body", "mhr" or "objects".
        status: "incomplete" for a Body release without MHR, or Objects without some of its parts.
        origin: "pinned" if every source is.
        native_contract: whether component files are those that the native runtime takes.
        safetensors: the canonical files in between, which need not be kept.
    """

    model: str
    layout: Layout
    precision: Precision
    status: Status
    origin: Origin
    native_contract: NativeContract
    sources: tuple[ManifestSource, ...]
    safetensors: tuple[ExtractedProduct, ...]
    files: tuple[ManifestFile, ...]
    left_out: tuple[ManifestLeftOut, ...]
    notes: tuple[str, ...]

    def to_document(self) -> JsonInput:
        """The document, ready to be written."""
        return {
            "schema_version": 1,
            "document": "manifest",
            "tool": TOOL,
            "release": {
                "model": self.model,
                "layout": self.layout,
                "precision": self.precision,
                "status": self.status,
                "origin": self.origin,
                "native_contract": self.native_contract,
            },
            "sources": [{"role": s.role, **_fields(s.identity)} for s in self.sources],
            "safetensors": [_fields(product) for product in self.safetensors],
            "files": [
                {
                    **_fields(file),
                    "companions": [_fields(c) for c in file.companions],
                    "tensors": [_fields(t) for t in file.tensors],
                }
                for file in self.files
            ],
            "left_out": [_fields(item) for item in self.left_out],
            "notes": self.notes,
        }

    @classmethod
    def from_document(cls, document: Any) -> Manifest:
        """The typed form of a document that meets the schema."""
        return cls(
            **document["release"],
            sources=tuple(_source(entry) for entry in document["sources"]),
            safetensors=tuple(ExtractedProduct(**entry) for entry in document["safetensors"]),
            files=tuple(_file(entry) for entry in document["files"]),
            left_out=tuple(ManifestLeftOut(**entry) for entry in document["left_out"]),
            notes=tuple(document["notes"]),
        )


def numbered_note(what: str) -> str:
    """The remark on a list of names that the archive does not have."""
    return f"the archive has no {what}: they are numbers"


_MAX_WHAT = 4096  # as the schema has it
CALL_NOT_MADE = "a call that the pickle asks for: recorded, never made"


def left_out_items(
    extraction: Extraction, tensors: Mapping[str, LeftOut]
) -> tuple[ManifestLeftOut, ...]:
    """All that a source holds and no file of the release does, calls included.

    Args:
        extraction: of the source.
        tensors: those that the contract leaves out, by name.
    """
    role = ROLES[extraction.model]
    return (
        *(ManifestLeftOut(role, name, tensor.reason) for name, tensor in tensors.items()),
        *(ManifestLeftOut(role, item.what, item.reason) for item in extraction.left_out),
        *(
            ManifestLeftOut(role, f"{name} x{count} at {path}"[:_MAX_WHAT], CALL_NOT_MADE)
            for path, name, count in extraction.inert
        ),
    )


def load_manifest(path: Path) -> Manifest:
    """Read a manifest strictly.

    Raises:
        InputError: it is no regular file, malformed, or does not meet its schema.
    """
    return Manifest.from_document(load_file(path, schema="manifest", max_bytes=MAX_BYTES))


def manifest_file(
    written: WrittenFile, companions: Iterable[CompanionDigests], known_answer: KnownAnswer
) -> ManifestFile:
    """The entry of a file that was written."""
    return ManifestFile(
        name=written.planned.name,
        role=written.planned.role,
        architecture=written.planned.architecture,
        bytes=written.sealed.size,
        sha256=written.sealed.sha256,
        known_answer=known_answer,
        content_sha256=written.content_sha256,
        semantics_sha256=written.semantics_sha256,
        companions=tuple(companions),
        tensors=tuple(
            ManifestTensor(t.name, t.type.name, t.shape, written.sha256[t.name])
            for t in written.tensors.values()
        ),
    )


def _fields(item: Any) -> Mapping[str, JsonInput]:
    return {name: getattr(item, name) for name in item.__dataclass_fields__}


def _source(entry: Any) -> ManifestSource:
    fields: dict[str, Any] = {**entry}
    return ManifestSource(fields.pop("role"), SourceIdentity(**fields))


def _file(entry: Any) -> ManifestFile:
    fields: dict[str, Any] = {**entry}
    fields["companions"] = tuple(CompanionDigests(**c) for c in entry["companions"])
    fields["tensors"] = tuple(_tensor(t) for t in entry["tensors"])
    return ManifestFile(**fields)


def _tensor(entry: Any) -> ManifestTensor:
    return ManifestTensor(entry["name"], entry["type"], tuple(entry["shape"]), entry["sha256"])

"""An extraction: safetensors files that came out of a legacy file, and the report on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from sam3d_gguf import __version__
from sam3d_gguf.extractors.models import ROLES, Model
from sam3d_gguf.extractors.object_tree import Json
from sam3d_gguf.extractors.worker_report import LeftOut
from sam3d_gguf.manifests.known_answers import load_known_answers
from sam3d_gguf.manifests.sources import load_sources
from sam3d_gguf.schemas.strict_json import JsonInput

REPORT = "extraction.json"
Origin: TypeAlias = Literal["pinned", "unpinned"]
KnownAnswer: TypeAlias = Literal["equal", "none"]
TOOL: Mapping[str, str] = {"name": "sam3d-gguf", "version": __version__}


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """A source file: base name, bytes, SHA-256 (hex), and whether this tool knows it."""

    name: str
    bytes: int
    sha256: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class ArchiveFacts:
    """What the legacy file is: form, wrapper, root folder, code members' hashes, globals named."""

    kind: str
    wrapper: str
    root: str
    code: Mapping[str, str]
    globals: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExtractedProduct:
    """A safetensors file; `known_answer` says whether a published hash confirms it."""

    file: str
    bytes: int
    sha256: str
    tensors: int
    known_answer: KnownAnswer


@dataclass(frozen=True, slots=True)
class ExtractedTensor:
    """A tensor of the source and where it went.

    Attributes:
        name: in the source.
        file, target: the safetensors file, and its name there.
        cls: learned, constant, geometry, index, training or unknown.
        source_dtype, dtype: in the source and in the safetensors file, by safetensors names.
        shape: PyTorch order.
        member: the storage's record in the source; empty in the legacy form.
        offset, strides: of the view, in elements.
        sha256: of the bytes in the safetensors file; None where that file isn't written and the
            source stores other bytes.
    """

    name: str
    file: str
    target: str
    cls: str
    source_dtype: str
    dtype: str
    shape: tuple[int, ...]
    member: str
    offset: int
    strides: tuple[int, ...]
    sha256: str | None


@dataclass(frozen=True, slots=True)
class AddedTensor:
    """A tensor of zeros that the source lacks and the safetensors file holds."""

    file: str
    target: str
    dtype: str
    shape: tuple[int, ...]
    reason: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Extraction:
    """The content of `extraction.json`; `document_schemas/extraction.schema.json` is its form."""

    model: Model
    source: SourceIdentity
    archive: ArchiveFacts
    products: tuple[ExtractedProduct, ...]
    tensors: tuple[ExtractedTensor, ...]
    added: tuple[AddedTensor, ...]
    shared_storages: tuple[tuple[str, ...], ...]
    left_out: tuple[LeftOut, ...]
    attributes: Mapping[str, Json]
    inert: tuple[tuple[str, str, int], ...]

    @property
    def by_name(self) -> dict[str, ExtractedTensor]:
        """The tensors by their names in the source."""
        return {tensor.name: tensor for tensor in self.tensors}

    def with_origin_of_products(self) -> Extraction:
        """The extraction with the origin that its files prove, whatever it says itself.

        Pinned are files that all have published hashes; the source then is the pinned one.
        """
        known = known_products()
        proven = all(known.get(p.file) == (p.bytes, p.sha256) for p in self.products)
        answer: KnownAnswer = "equal" if proven else "none"
        source = replace(self.source, origin="unpinned")
        if proven:
            pin = load_sources().with_role(ROLES[self.model])[0]
            source = SourceIdentity(self.source.name, pin.bytes, pin.sha256, "pinned")
        products = tuple(replace(product, known_answer=answer) for product in self.products)
        return replace(self, source=source, products=products)

    def to_document(self) -> JsonInput:
        """The document, ready to be written."""
        return {
            "schema_version": 1,
            "document": "extraction",
            "tool": TOOL,
            "model": self.model,
            "source": {**_fields(self.source), "sha256_after": self.source.sha256},
            "archive": _fields(self.archive),
            "products": [_fields(product) for product in self.products],
            "tensors": [_renamed(_fields(tensor)) for tensor in self.tensors],
            "added": [_fields(tensor) | {"value": 0} for tensor in self.added],
            "shared_storages": self.shared_storages,
            "left_out": [_fields(item) for item in self.left_out],
            "attributes": _json(self.attributes),
            "inert": [{"path": p, "global": g, "count": n} for p, g, n in self.inert],
        }

    @classmethod
    def from_document(cls, document: Any) -> Extraction:
        """The typed form of a document that meets the schema."""
        source, archive = document["source"], document["archive"]
        return cls(
            model=document["model"],
            source=SourceIdentity(
                source["name"], source["bytes"], source["sha256"], source["origin"]
            ),
            archive=ArchiveFacts(
                archive["kind"],
                archive["wrapper"],
                archive["root"],
                archive["code"],
                tuple(archive["globals"]),
            ),
            products=tuple(ExtractedProduct(**entry) for entry in document["products"]),
            tensors=tuple(_tensor(entry) for entry in document["tensors"]),
            added=tuple(_added(entry) for entry in document["added"]),
            shared_storages=tuple(tuple(names) for names in document["shared_storages"]),
            left_out=tuple(LeftOut(**entry) for entry in document["left_out"]),
            attributes=document["attributes"],
            inert=tuple((e["path"], e["global"], e["count"]) for e in document["inert"]),
        )


def display_name(path: Path) -> str:
    """A file's base name for reports, with what is not printable replaced."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in path.name)


def known_products() -> dict[str, tuple[int, str]]:
    """The published size and SHA-256 of the product files that have any, by file name."""
    answers = load_known_answers()
    return {
        "backbone.safetensors": (
            answers.body_backbone_safetensors.bytes,
            answers.body_backbone_safetensors.sha256,
        ),
        "other.safetensors": (
            answers.body_other_safetensors.bytes,
            answers.body_other_safetensors.sha256,
        ),
    }


def _fields(item: Any) -> dict[str, JsonInput]:
    return {name: getattr(item, name) for name in item.__dataclass_fields__}


def _renamed(fields: dict[str, JsonInput]) -> dict[str, JsonInput]:
    return {"class" if name == "cls" else name: value for name, value in fields.items()}


def _json(value: Any) -> JsonInput:
    return value  # type: ignore[no-any-return]  # both types name plain JSON values


def _tensor(entry: Any) -> ExtractedTensor:
    fields: dict[str, Any] = {**entry, "cls": entry["class"]}
    del fields["class"]
    fields["shape"], fields["strides"] = tuple(entry["shape"]), tuple(entry["strides"])
    return ExtractedTensor(**fields)


def _added(entry: Any) -> AddedTensor:
    fields: dict[str, Any] = {**entry, "shape": tuple(entry["shape"])}
    del fields["value"]
    return AddedTensor(**fields)

"""What the sandboxed reader tells the host, and how the host takes it: as a claim.

The worker writes `report.json`. The host reads it strictly, by its schema, and believes of it only
what it can hold against the file itself: that each tensor lies in a storage, and each storage is
the member that the zip directory, which the host reads too, has at that place. Which name belongs
to which bytes is the part that stays a claim; known answers settle it for pinned sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sam3d_gguf.extractors.archive import Archive
from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.kinds import FileKind
from sam3d_gguf.extractors.object_tree import Json
from sam3d_gguf.extractors.tensor_ref import ITEMSIZE, StorageRef, TensorRef
from sam3d_gguf.extractors.zip_directory import STORED, ZipMember, read_zip_directory
from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import JsonInput

REPORT = "report.json"
ERROR = "error.json"
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that the archive holds and the products don't: where it hangs, and why not."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The reader's findings; see `Archive` for the terms.

    Attributes:
        inert: recorded calls that have no meaning and were never made: (path, global, count).
    """

    kind: FileKind
    wrapper: str
    root: str
    tensors: Mapping[str, TensorRef]
    shared: tuple[tuple[str, ...], ...]
    attributes: Mapping[str, Json]
    left_out: tuple[LeftOut, ...]
    inert: tuple[tuple[str, str, int], ...]
    globals: tuple[str, ...]
    code: Mapping[str, str]


def encode(archive: Archive) -> JsonInput:
    """The document that the worker writes; `document_schemas/worker.schema.json` describes it."""
    storages = list(dict.fromkeys(tensor.storage for tensor in archive.tensors.values()))
    numbers = {storage: number for number, storage in enumerate(storages)}
    return {
        "schema_version": 1,
        "kind": archive.kind.name,
        "wrapper": archive.wrapper,
        "root": archive.root,
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "strides": tensor.strides,
                "storage": numbers[tensor.storage],
                "storage_offset": tensor.storage_offset,
            }
            for tensor in archive.tensors.values()
        ],
        "storages": [
            {
                "key": storage.key,
                "member": storage.member,
                "file_offset": storage.file_offset,
                "bytes": storage.nbytes,
            }
            for storage in storages
        ],
        "shared": archive.shared,
        "attributes": {path: _finite(value) for path, value in archive.attributes.items()},
        "left_out": [{"what": what, "reason": reason} for what, reason in _left_out(archive)],
        "inert": [
            {"path": call.path, "global": call.function, "count": call.count}
            for call in archive.inert
        ],
        "globals": archive.globals,
        "code": archive.code,
    }


def decode(document: Any, source: ByteSource, kind: FileKind) -> WorkerReport:
    """The typed form of a document that meets the schema, held against the file of that kind.

    Raises:
        InputError: the kind is another, a name occurs twice, or a tensor or storage lies elsewhere
            than it can.
    """
    if document["kind"] != kind.name:
        raise _claim(f"the kind {document['kind']}", source.name)
    members: Mapping[str, ZipMember] = {}
    if kind is not FileKind.TORCH_LEGACY:
        members = read_zip_directory(source).members
    storages = [_storage(entry, members, source) for entry in document["storages"]]
    tensors: dict[str, TensorRef] = {}
    for entry in document["tensors"]:
        tensor = _tensor(entry, storages, source.name)
        if tensor.name in tensors:
            raise _claim(f"the tensor {tensor.name!r} twice", source.name)
        tensors[tensor.name] = tensor
    return WorkerReport(
        kind=kind,
        wrapper=document["wrapper"],
        root=document["root"],
        tensors=tensors,
        shared=tuple(tuple(names) for names in document["shared"]),
        attributes=document["attributes"],
        left_out=tuple(LeftOut(e["what"], e["reason"]) for e in document["left_out"]),
        inert=tuple((e["path"], e["global"], e["count"]) for e in document["inert"]),
        globals=tuple(document["globals"]),
        code=document["code"],
    )


def _left_out(archive: Archive) -> list[tuple[str, str]]:
    return [
        *((e.path, f"a tensor that {e.reason}") for e in archive.excluded),
        *((c.path, f"not a tensor: {c.kind} {c.text}".rstrip()) for c in archive.content),
        *((name, "a constant of the archive's code") for name in archive.constants),
        *((name, "no tensor of the model lies in it") for name in archive.ignored),
    ]


def _finite(value: Json) -> JsonInput:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value


def _storage(entry: Any, members: Mapping[str, ZipMember], source: ByteSource) -> StorageRef:
    storage = StorageRef(entry["key"], entry["member"], entry["file_offset"], entry["bytes"])
    end = storage.file_offset + storage.nbytes
    member = members.get(storage.member)
    if member is not None:
        real = (member.offset, member.size, member.method)
        fits = (storage.file_offset, storage.nbytes, STORED) == real
    else:
        fits = not members and end <= source.size
    if not fits:
        raise _claim(f"the storage {storage.key!r} at byte {storage.file_offset}", source.name)
    return storage


def _tensor(entry: Any, storages: list[StorageRef], where: str) -> TensorRef:
    number: int = entry["storage"]
    shape: tuple[int, ...] = tuple(entry["shape"])
    strides: tuple[int, ...] = tuple(entry["strides"])
    if number >= len(storages) or len(shape) != len(strides):
        raise _claim(f"the tensor {entry['name']!r}", where)
    tensor = TensorRef(
        entry["name"], entry["dtype"], shape, strides, storages[number], entry["storage_offset"]
    )
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    end = (tensor.storage_offset + last + 1) * ITEMSIZE[tensor.dtype]
    if tensor.elements and end > tensor.storage.nbytes:
        raise _claim(f"the tensor {tensor.name!r} outside of its storage", where)
    return tensor


def _claim(what: str, where: str) -> InputError:
    return InputError(f"the reader reports {what}, which the file does not hold", where=where)

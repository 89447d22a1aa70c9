"""A second opinion on a GGUF file: the `gguf` package must find the same in it as our own reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import gguf

from sam3d_gguf.convert.gguf_format import GgufValue
from sam3d_gguf.convert.gguf_reader import GgufFile
from sam3d_gguf.extractors.files import OpenedFile
from sam3d_gguf.schemas.errors import InputError


def cross_read(file: OpenedFile, ours: GgufFile) -> None:
    """Read the header again with the `gguf` package; tensor data is mapped, not read.

    Raises:
        InputError: it fails, or finds other metadata or tensors.
    """
    try:
        # The descriptor's own path: whatever lies at the file's path by now, this is the same file.
        theirs: Any = gguf.GGUFReader(f"/proc/self/fd/{file.fd}")
        differing = next(_differences(theirs, ours), None)
    except Exception as error:
        raise InputError(
            f"the gguf package can't read the file: {type(error).__name__}: {str(error)[:200]}",
            where=str(file.path),
        ) from error
    if differing is not None:
        raise InputError(f"the gguf package reads {differing} differently", where=str(file.path))


def _differences(theirs: Any, ours: GgufFile) -> Iterator[str]:
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    yield from sorted(fields.keys() ^ ours.metadata.keys())
    for key, value in ours.metadata.items():
        if not _equal(fields[key], value):
            yield key
    tensors = {tensor.name: tensor for tensor in theirs.tensors}
    yield from sorted(tensors.keys() ^ ours.tensors.keys())
    for name, tensor in ours.tensors.items():
        other = tensors[name]
        found = (
            tuple(int(size) for size in reversed(other.shape)),
            int(other.tensor_type),
            int(other.data_offset),
            int(other.n_bytes),
        )
        if found != (tensor.shape, int(tensor.type), tensor.offset, tensor.nbytes):
            yield name


def _equal(field: Any, value: GgufValue) -> bool:
    types = [int(kind) for kind in field.types]
    expected = [int(value.type)]
    if value.item_type is not None and cast("tuple[object, ...]", value.value):
        expected.append(int(value.item_type))
    contents = field.contents()
    if isinstance(value.value, tuple):
        return types == expected and list(contents) == list(value.value)
    return types == expected and contents == value.value

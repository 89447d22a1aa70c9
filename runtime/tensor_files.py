"""Read and write safetensors files of any size in bounded memory.

The format is the one of https://github.com/huggingface/safetensors: an unsigned 64-bit header
length, a JSON header, then the tensors' little-endian bytes without gaps.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.output import publish
from sam3d_gguf.schemas.errors import InputError

Array = NDArray[Any]

MAX_HEADER_BYTES = 100_000_000
_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items() if name != "BF16"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `dtype` is the safetensors name, `offset` counts from the file's
    start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _entry(name: str, value: object, data: int, where: str) -> TensorEntry:
    fault = InputError(
        f"tensor {name!r} is described wrongly",
        where=where,
        expected="dtype, shape and data_offsets that agree",
    )
    if not isinstance(value, dict):
        raise fault
    spec = cast("dict[str, object]", value)
    dtype, shape, offsets = spec.get("dtype"), spec.get("shape"), spec.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES or len(spec) != 3:
        raise fault
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise fault
    nbytes = math.prod(shape) * _DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise fault
    return TensorEntry(name, dtype, tuple(shape), data + offsets[0], nbytes)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 1 << 48 for item in cast("list[object]", value)
    )


class TensorFile:
    """A safetensors file that stays open for reading.

    Attributes:
        tensors: the entries by name, in file order.
        metadata: the header's string metadata.

    Raises:
        InputError: the file is not well formed.
    """

    __slots__ = ("_fd", "metadata", "path", "tensors")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from error
        try:
            self.tensors, self.metadata = self._read_header()
        except BaseException:
            os.close(self._fd)
            raise

    def _read_header(self) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        where, size = str(self.path), os.fstat(self._fd).st_size
        prefix = os.pread(self._fd, 8, 0)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise InputError(
                "not a safetensors file", where=where, expected="a header within the file"
            )
        try:
            header: object = json.loads(
                os.pread(self._fd, length, 8), object_pairs_hook=_no_duplicates
            )
        except (ValueError, RecursionError) as error:
            raise InputError("the safetensors header is not valid JSON", where=where) from error
        if not isinstance(header, dict):
            raise InputError("the safetensors header is not an object", where=where)
        values = cast("dict[str, object]", header)
        metadata = values.pop("__metadata__", {})
        entries = [_entry(name, value, 8 + length, where) for name, value in values.items()]
        entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
        end = 8 + length
        for entry in entries:
            if entry.offset != end:
                raise InputError(
                    "tensors overlap or leave gaps", where=where, expected="contiguous tensors"
                )
            end += entry.nbytes
        if end != size:
            raise InputError(f"{size} bytes long", where=where, expected=f"{end} bytes")
        if not isinstance(metadata, dict):
            raise InputError("__metadata__ is not an object", where=where)
        texts = cast("dict[str, object]", metadata)
        return {entry.name: entry for entry in entries}, {k: str(v) for k, v in texts.items()}

    def blocks(self, name: str, elements: int = 1 << 20) -> Iterator[Array]:
        """Yield the tensor as flat arrays of at most `elements`; BF16 is widened to float32."""
        entry = self.tensors[name]
        dtype = _DTYPES[entry.dtype]
        for start in range(0, entry.nbytes, elements * dtype.itemsize):
            count = min(elements * dtype.itemsize, entry.nbytes - start)
            data = os.pread(self._fd, count, entry.offset + start)
            if len(data) != count:
                raise InputError("the file became shorter", where=str(self.path))
            block = np.frombuffer(data, dtype)
            if entry.dtype == "BF16":
                block = (block.astype(np.uint32) << 16).view(np.float32)
            yield block

    def read(self, name: str) -> Array:
        """The whole tensor in its shape; BF16 is widened to float32."""
        entry = self.tensors[name]
        blocks = list(self.blocks(name))
        if not blocks:
            dtype = np.dtype("<f4") if entry.dtype == "BF16" else _DTYPES[entry.dtype]
            return np.zeros(entry.shape, dtype)
        return np.concatenate(blocks).reshape(entry.shape)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def write_tensors(
    path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a new safetensors file, tensors sorted by name, header padded to 8 bytes.

    Args:
        path: a file that does not exist yet.
        tensors: arrays by name; any of the format's numeric dtypes.
        metadata: string metadata.

    Raises:
        OutputError: the destination exists or cannot be written.
    """
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    offset = 0
    parts: list[bytes] = []
    for name in sorted(tensors):
        array = np.asarray(tensors[name])
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        data = little.tobytes()
        header[name] = {
            "dtype": _NAMES[little.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        parts.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    publish(path, [struct.pack("<Q", len(text)), text, *parts])

"""Read and write safetensors files of any size in bounded memory.

The format is the one of https://github.com/huggingface/safetensors: an unsigned 64-bit header
length, a JSON header, then the tensors' little-endian bytes without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.extractors.safetensors_format import read_header
from sam3d_gguf.runtime.output import publish
from sam3d_gguf.schemas.closing import Closing
from sam3d_gguf.schemas.errors import InputError

Array = NDArray[Any]

MAX_NAME = 4096
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


class TensorFile(Closing):
    """A safetensors file that stays open for reading.

    Attributes:
        tensors: the entries by name, in file order.
        metadata: the header's string metadata.
        opened: the file, for its identity.

    Raises:
        InputError: the file cannot be read, is not well formed, or holds another type.
    """

    __slots__ = ("metadata", "opened", "path", "tensors")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened = open_source(path)
        try:
            header = read_header(self.opened.source)
            self.metadata: Mapping[str, str] = header.metadata or {}
            self.tensors: dict[str, TensorEntry] = {}
            for entry in header.entries.values():
                if entry.dtype not in _DTYPES:
                    raise InputError(
                        f"tensor {entry.name!r} has the type {entry.dtype}",
                        where=str(path),
                        expected=", ".join(_DTYPES),
                    )
                if len(entry.name) > MAX_NAME:
                    raise InputError(
                        f"a tensor's name has {len(entry.name)} characters",
                        where=str(path),
                        expected=f"at most {MAX_NAME}",
                    )
                offset = header.data_start + entry.begin
                self.tensors[entry.name] = TensorEntry(
                    entry.name, entry.dtype, entry.shape, offset, entry.nbytes
                )
        except BaseException:
            self.opened.close()
            raise

    def blocks(self, name: str, elements: int = 1 << 20) -> Iterator[Array]:
        """Yield the tensor as flat arrays of at most `elements`; BF16 is widened to float32."""
        entry = self.tensors[name]
        dtype = _DTYPES[entry.dtype]
        for start in range(0, entry.nbytes, elements * dtype.itemsize):
            count = min(elements * dtype.itemsize, entry.nbytes - start)
            block = np.frombuffer(self.opened.source.pread(entry.offset + start, count), dtype)
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
        self.opened.close()


def write_tensors(
    path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a new safetensors file; see `encode_tensors`.

    Raises:
        OutputError: the destination exists or cannot be written.
    """
    publish([(path, encode_tensors(tensors, metadata))])


def encode_tensors(
    tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> list[bytes]:
    """The parts of a safetensors file: tensors sorted by name, header padded to 8 bytes.

    Args:
        tensors: arrays by name; any of the format's numeric dtypes.
        metadata: string metadata.
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
    return [struct.pack("<Q", len(text)), text, *parts]

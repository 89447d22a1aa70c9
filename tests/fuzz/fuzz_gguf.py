"""Fuzz target: the strict GGUF reader takes a file exactly, or refuses it as a user's error.

What it takes must encode again to the same bytes, and the gguf package must read the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import gguf
from memory_source import memory_source

from sam3d_gguf.convert.gguf_format import (
    MAGIC,
    GgmlType,
    GgufValue,
    encode_metadata,
    encode_tensor_info,
)
from sam3d_gguf.convert.gguf_reader import GgufFile, read_gguf
from sam3d_gguf.schemas.errors import Sam3dError

# The package doesn't know the first, and has another size for the second than GGML.
_NOT_THE_PACKAGES = (GgmlType.Q2_0, GgmlType.Q8_1)


def one_input(data: bytes) -> None:
    """Reads data as a GGUF file; raises anything but a refusal only where the reader is wrong."""
    with memory_source(data) as source:
        try:
            file = read_gguf(source)
        except Sam3dError:
            return
        tensors = file.tensors.values()
        assert all(t.offset + t.nbytes <= len(data) for t in tensors)
        # A NaN need not survive struct's way through a double bit for bit.
        if not any(math.isnan(f) for v in file.metadata.values() for f in _floats(v)):
            assert data.startswith(_encode(file))
        if not any(tensor.type in _NOT_THE_PACKAGES for tensor in tensors):
            _compare(file, gguf.GGUFReader(f"/proc/self/fd/{source.fd}"))


def _encode(file: GgufFile) -> bytes:
    header = MAGIC + struct.pack("<IQQ", file.version, len(file.tensors), len(file.metadata))
    header += b"".join(encode_metadata(key, value) for key, value in file.metadata.items())
    for tensor in file.tensors.values():
        header += encode_tensor_info(tensor.name, tensor.shape, tensor.type)
        header += struct.pack("<Q", tensor.offset - file.data_offset)
    return header.ljust(file.data_offset, b"\0")


def _floats(value: GgufValue) -> Iterator[float]:
    items = value.value if isinstance(value.value, tuple) else (value.value,)
    for item in items:
        if isinstance(item, GgufValue):
            yield from _floats(item)
        elif isinstance(item, float):
            yield item


def _compare(file: GgufFile, other: gguf.GGUFReader) -> None:
    assert other.alignment == file.alignment
    assert [key for key in other.fields if not key.startswith("GGUF.")] == list(file.metadata)
    found = [
        (t.name, tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes) for t in other.tensors
    ]
    assert found == [(t.name, t.shape, t.offset, t.nbytes) for t in file.tensors.values()]

"""A reader of the native runtime's component files, for tests: written from its contract alone.

It shares no code with the product's reader or writer, and takes the contract literally: GGUF v3,
little endian, alignment 32; key/values sorted by key, UINT32 or STRING (printable ASCII, 1 to 65536
bytes); tensors sorted by name, rank 1 to 4, F32 or I32, at the next multiple of 32 each, names of at
most 63 bytes; zero padding; nothing after the last padding; finite floats.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float32] | npt.NDArray[np.int32]


class NotNativeError(Exception):
    """The file breaks the contract."""


@dataclass(frozen=True)
class NativeTensor:
    """A tensor: F32 or I32, its PyTorch shape, and its place in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class NativeFile:
    """What a component file holds."""

    path: Path
    metadata: dict[str, int | str]
    tensors: dict[str, NativeTensor]

    def read(self, name: str) -> Numbers:
        """Returns a tensor in its PyTorch shape."""
        tensor = self.tensors[name]
        dtype = np.dtype("<f4" if tensor.dtype == "F32" else "<i4")
        count = math.prod(tensor.shape)
        values: Numbers = np.fromfile(self.path, dtype, count, offset=tensor.begin)
        return values.reshape(tensor.shape)


def read_native(path: Path) -> NativeFile:
    """Reads a whole component file.

    Raises:
        NotNativeError: anything that the contract doesn't allow.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Parser(data).parse(path)
        except struct.error as error:
            raise NotNativeError("truncated") from error


class _Parser:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def parse(self, path: Path) -> NativeFile:
        _demand(self.data[:4] == b"GGUF", "magic")
        self.at = 4
        _demand(self.number("<I") == 3, "version")
        tensor_count, metadata_count = self.number("<Q"), self.number("<Q")
        metadata = self.parse_metadata(metadata_count)
        _demand(metadata.get("general.alignment") == 32, "alignment")
        tensors = self.parse_tensors(tensor_count)
        return NativeFile(path, metadata, tensors)

    def parse_metadata(self, count: int) -> dict[str, int | str]:
        metadata: dict[str, int | str] = {}
        last = ""
        for _ in range(count):
            key = self.text().decode("ascii")
            _demand(key > last, f"key {key} out of order")
            last = key
            kind = self.number("<I")
            _demand(kind in (4, 8), f"type {kind} of {key}")
            if kind == 4:
                metadata[key] = self.number("<I")
                continue
            text = self.text()
            _demand(1 <= len(text) <= 65536, f"length of {key}")
            _demand(all(0x20 <= byte <= 0x7E for byte in text), f"characters of {key}")
            metadata[key] = text.decode("ascii")
        return metadata

    def parse_tensors(self, count: int) -> dict[str, NativeTensor]:
        infos: dict[str, tuple[int, tuple[int, ...], int]] = {}
        last = b""
        for _ in range(count):
            raw = self.text()
            _demand(0 < len(raw) <= 63 and raw > last, f"name {raw!r}")
            last = raw
            rank = self.number("<I")
            _demand(1 <= rank <= 4, f"rank of {raw!r}")
            dims = tuple(self.number("<Q") for _ in range(rank))
            _demand(all(0 < dim < 1 << 31 for dim in dims), f"dimensions of {raw!r}")
            kind = self.number("<I")
            _demand(kind in (0, 26), f"type {kind} of {raw!r}")
            infos[raw.decode("ascii")] = (kind, dims, self.number("<Q"))
        return self.place(infos)

    def place(self, infos: dict[str, tuple[int, tuple[int, ...], int]]) -> dict[str, NativeTensor]:
        start = position = self.skip_padding(self.at)
        tensors: dict[str, NativeTensor] = {}
        for name, (kind, dims, offset) in infos.items():
            _demand(start + offset == position, f"offset of {name}")
            end = position + 4 * math.prod(dims)
            _demand(end <= len(self.data), f"end of {name}")
            if kind == 0:
                self.check_finite(name, position, end)
            tensors[name] = NativeTensor("F32" if kind == 0 else "I32", dims[::-1], position, end)
            position = self.skip_padding(end)
        _demand(position == len(self.data), "bytes after the last tensor")
        return tensors

    def check_finite(self, name: str, begin: int, end: int) -> None:
        step = 64 << 20
        for at in range(begin, end, step):
            values = np.frombuffer(self.data[at : min(at + step, end)], "<f4")
            _demand(bool(np.isfinite(values).all()), f"values of {name}")

    def skip_padding(self, at: int) -> int:
        end = (at + 31) // 32 * 32
        _demand(self.data[at:end] == bytes(end - at), f"padding at {at}")
        return end

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return int(value)

    def text(self) -> bytes:
        length = self.number("<Q")
        _demand(length <= len(self.data) - self.at, "string length")
        self.at += length
        return self.data[self.at - length : self.at]


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise NotNativeError(what)

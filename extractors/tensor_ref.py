"""Where a tensor's elements lie in a file, without the elements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

ITEMSIZE: Mapping[str, int] = MappingProxyType(
    {
        "BF16": 2,
        "F16": 2,
        "F32": 4,
        "F64": 8,
        "I8": 1,
        "I16": 2,
        "I32": 4,
        "I64": 8,
        "U8": 1,
        "BOOL": 1,
    }
)
"""Bytes of one element of each dtype that is read, by its safetensors name."""


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A run of bytes in the file that tensors view.

    Attributes:
        key: torch's name for the storage.
        member: the zip member below the root folder; empty in the legacy form.
        file_offset: where the bytes begin in the file.
        nbytes: how many there are.
    """

    key: str
    member: str
    file_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a view of a storage, known to lie inside of it.

    Attributes:
        dtype: safetensors name, a key of `ITEMSIZE`.
        shape: sizes, outermost dimension first; () for a 0-d tensor.
        strides: elements between neighbours along each dimension, none negative.
        storage_offset: elements before the first one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: StorageRef
    storage_offset: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def elements(self) -> int:
        """How many elements the tensor has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, each counted, even where the storage repeats them."""
        return self.elements * self.itemsize

    @property
    def file_offset(self) -> int:
        """Where the first element lies in the file."""
        return self.storage.file_offset + self.storage_offset * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the file holds the elements in C order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return self.elements == 0
            expected *= size
        return True

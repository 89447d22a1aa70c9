"""Where the tensors of an opened GGUF lie, and the small ones as arrays."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sam3d_gguf.schemas.errors import ContractError

FILE_TYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
}


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One tensor of the file.

    Attributes:
        shape: in PyTorch order, row-major.
        type: GGUF type name, a key of `FILE_TYPES`.
        offset: of the first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The tensors and metadata of one GGUF that the strict reader has passed.

    Attributes:
        path: the file, for messages.
        metadata: its metadata, as Python values.
        tensors: by name.
        data: the mapped file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, WeightTensor]
    data: mmap.mmap

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> WeightTensor:
        """The tensor of that name.

        Raises:
            ContractError: there is none.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ContractError(
                f"the tensor {name} is missing",
                where=str(self.path),
                action="Convert the model again with this version.",
            )
        return tensor

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A read-only view of the tensor as stored; BF16 as uint16."""
        tensor = self.tensor(name)
        flat = np.frombuffer(
            self.data, FILE_TYPES[tensor.type], count=tensor.elements, offset=tensor.offset
        )
        return flat.reshape(tensor.shape)

    def array(self, name: str) -> npt.NDArray[Any]:
        """The tensor as float32 (exact) or int32; a view where the file holds that type."""
        raw = self.raw(name)
        kind = self.tensor(name).type
        if kind == "BF16":
            return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if kind == "F16":
            return raw.astype(np.float32)
        return raw.astype(np.int32) if kind == "I8" else raw

    def release(self, name: str) -> None:
        """Lets the system drop the pages of a tensor that was copied; they can be read again."""
        tensor = self.tensor(name)
        end = tensor.offset + tensor.elements * FILE_TYPES[tensor.type].itemsize
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (end - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            self.data.madvise(mmap.MADV_DONTNEED, start, length)

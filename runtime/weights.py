"""Where the tensors of an opened GGUF lie, and their values.

They are read and never mapped: who cuts a mapped file short ends the processes that look at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sam3d_gguf.extractors.files import OpenedFile
from sam3d_gguf.schemas.closing import Closing
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
class Weights(Closing):
    """The tensors and metadata of one GGUF that the strict reader has passed; reads till `close`.

    Attributes:
        metadata: the file's metadata, as Python values.
        tensors: by name.
        opened: the file.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, WeightTensor]
    opened: OpenedFile

    @property
    def path(self) -> Path:
        """The file, for messages."""
        return self.opened.path

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

    def read_into(self, name: str, first: int, values: npt.NDArray[Any]) -> None:
        """Fills a flat array of the tensor's stored type with its values from number `first` on.

        Raises:
            InputError: the file was changed since it was opened, or can't be read.
        """
        offset = self.tensor(name).offset + first * values.itemsize
        self.opened.source.pread_into(offset, values.data)
        self.opened.assert_unchanged()

    def raw(self, name: str) -> npt.NDArray[Any]:
        """The tensor as stored; BF16 as uint16."""
        tensor = self.tensor(name)
        flat = np.empty(tensor.elements, FILE_TYPES[tensor.type])
        self.read_into(name, 0, flat)
        return flat.reshape(tensor.shape)

    def array(self, name: str) -> npt.NDArray[Any]:
        """The tensor as float32 (exact) or int32."""
        raw = self.raw(name)
        kind = self.tensor(name).type
        if kind == "BF16":
            return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if kind == "F16":
            return raw.astype(np.float32)
        return raw.astype(np.int32) if kind == "I8" else raw

    def close(self) -> None:
        """Close the file."""
        self.opened.close()

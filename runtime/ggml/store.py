"""Weights in backend buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.functions import MAX_DIMS, TENSOR_ALIGNMENT, InitParams
from sam3d_gguf.runtime.ggml.host_memory import HEADROOM, require_memory
from sam3d_gguf.runtime.weights import FILE_TYPES, Weights, WeightTensor
from sam3d_gguf.schemas.closing import Closing
from sam3d_gguf.schemas.errors import ContractError

GGML_TYPES: Mapping[str, int] = {"F32": 0, "F16": 1, "I8": 24, "I32": 26, "BF16": 30}
_USAGE_WEIGHTS = 1
_UPLOAD_ELEMENTS = 1 << 20
_CONTEXT_SLACK = 1 << 12


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of libggml.

    Attributes:
        address: of its struct ggml_tensor.
        shape: in PyTorch order.
    """

    address: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Planned:
    name: str
    shape: tuple[int, ...]
    type: str


def new_tensor(backend: Backend, context: int, type_: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor without data in a context of libggml."""
    sizes = (ctypes.c_int64 * MAX_DIMS)(*reversed(shape), *([1] * (MAX_DIMS - len(shape))))
    address = backend.library.pointer(
        "ggml_new_tensor", context, GGML_TYPES[type_], MAX_DIMS, sizes
    )
    return Tensor(address, shape)


def new_context(backend: Backend, tensors: int, extra: int = 0) -> int:
    """A context for that many tensor headers."""
    size = int(backend.library.call("ggml_tensor_overhead")) * tensors + extra + _CONTEXT_SLACK
    require_memory(size + HEADROOM, "a graph")
    return backend.library.pointer("ggml_init", InitParams(size, None, True))


class _Widening:
    """BF16 bits to the same values in F32, in memory that each call reuses."""

    def __init__(self) -> None:
        self._halves = np.zeros((_UPLOAD_ELEMENTS, 2), np.uint16)

    def __call__(self, bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
        halves = self._halves[: bits.size]
        halves[:, 1] = bits
        return halves.reshape(-1).view(np.float32)


class WeightStore(Closing):
    """The tensors that a model's graphs read, on the device, loaded once.

    Where the device can compute on host memory, tensors that keep their type are used in the
    mapped file itself; the rest is copied. With strict-F32 precision BF16 and F16 become F32
    (exact), because libggml would round the other operand of a product down to their type.
    """

    def __init__(
        self,
        backend: Backend,
        weights: Weights,
        names: Iterable[str],
        derived: Mapping[str, npt.NDArray[np.float32]] | None = None,
    ) -> None:
        """Loads the named tensors and the derived arrays.

        Raises:
            ContractError: a name is missing.
            BackendError: a tensor is larger than the device allows, or memory is too small.
        """
        self._backend = backend
        self._weights = weights
        self._tensors: dict[str, Tensor] = {}
        self._contexts: list[int] = []
        self._buffers: list[int] = []
        self.mapped_bytes = 0
        self.copied_bytes = 0
        arrays = derived or {}
        mapped: list[WeightTensor] = []
        copied: list[_Planned] = []
        for name in names:
            tensor = weights.tensor(name)
            if self._is_mapped(tensor):
                mapped.append(tensor)
            else:
                copied.append(_Planned(name, tensor.shape, self._type(tensor)))
        copied += [_Planned(name, array.shape, "F32") for name, array in arrays.items()]
        try:
            self._map(mapped)
            self._copy(copied, arrays)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ContractError(f"the tensor {name} is missing", where=str(self._weights.path))
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def _type(self, tensor: WeightTensor) -> str:
        matrix = tensor.name.endswith("weight") and len(tensor.shape) >= 2
        if tensor.type in ("BF16", "F16") and (self._backend.precision != "fast" or not matrix):
            return "F32"
        return tensor.type

    def _is_mapped(self, tensor: WeightTensor) -> bool:
        return (
            self._backend.device.host_pointers
            and self._type(tensor) == tensor.type
            and tensor.offset % TENSOR_ALIGNMENT == 0
        )

    def _map(self, tensors: list[WeightTensor]) -> None:
        if not tensors:
            return
        library = self._backend.library
        whole = np.frombuffer(self._weights.data, np.uint8)
        base = int(whole.ctypes.data)
        buffer = library.pointer(
            "ggml_backend_dev_buffer_from_host_ptr",
            self._backend.device.address,
            base,
            whole.nbytes,
            whole.nbytes,
        )
        self._buffers.append(buffer)
        library.call("ggml_backend_buffer_set_usage", buffer, _USAGE_WEIGHTS)
        context = new_context(self._backend, len(tensors))
        self._contexts.append(context)
        for each in tensors:
            tensor = new_tensor(self._backend, context, each.type, each.shape)
            library.call("ggml_set_name", tensor.address, each.name.encode())
            status = library.call(
                "ggml_backend_tensor_alloc", buffer, tensor.address, base + each.offset
            )
            if status != 0:
                raise BackendError("a mapped tensor was refused by the device", where=each.name)
            self._tensors[each.name] = tensor
            self.mapped_bytes += each.elements * FILE_TYPES[each.type].itemsize

    def _copy(self, planned: list[_Planned], arrays: Mapping[str, npt.NDArray[np.float32]]) -> None:
        if not planned:
            return
        backend, library = self._backend, self._backend.library
        context = new_context(backend, len(planned))
        self._contexts.append(context)
        for each in planned:
            tensor = new_tensor(backend, context, each.type, each.shape)
            library.call("ggml_set_name", tensor.address, each.name.encode())
            size = int(library.call("ggml_nbytes", tensor.address))
            if size > backend.max_buffer_size:
                raise BackendError(
                    f"the tensor has {size} bytes and a buffer of {backend.device.name} at most "
                    f"{backend.max_buffer_size}",
                    where=each.name,
                    action="Choose another device.",
                )
            self._tensors[each.name] = tensor
        size = int(
            library.call(
                "ggml_backend_alloc_ctx_tensors_from_buft_size", context, backend.buffer_type
            )
        )
        backend.check_memory(size, "the weights")
        buffer = library.pointer(
            "ggml_backend_alloc_ctx_tensors_from_buft", context, backend.buffer_type
        )
        self._buffers.append(buffer)
        library.call("ggml_backend_buffer_set_usage", buffer, _USAGE_WEIGHTS)
        self.copied_bytes += int(library.call("ggml_backend_buffer_get_size", buffer))
        for each in planned:
            if each.name in arrays:
                self._upload(each, arrays[each.name])
            else:
                self._upload(each, self._weights.raw(each.name))
                self._weights.release(each.name)

    def _upload(self, planned: _Planned, source: npt.NDArray[Any]) -> None:
        flat = source.reshape(-1)
        itemsize = FILE_TYPES[planned.type].itemsize
        address = self._tensors[planned.name].address
        widen = _Widening() if planned.type == "F32" and flat.dtype == np.uint16 else None
        for start in range(0, flat.size, _UPLOAD_ELEMENTS):
            block = flat[start : start + _UPLOAD_ELEMENTS]
            if widen is not None:
                block = widen(block)
            elif planned.type == "F32":
                block = block.astype(np.float32, copy=False)
            block = np.ascontiguousarray(block)
            self._backend.library.call(
                "ggml_backend_tensor_set",
                address,
                int(block.ctypes.data),
                start * itemsize,
                block.nbytes,
            )

    def close(self) -> None:
        """Frees the buffers; graphs that use them must be closed before."""
        library = self._backend.library
        for buffer in self._buffers:
            library.call("ggml_backend_buffer_free", buffer)
        for context in self._contexts:
            library.call("ggml_free", context)
        self._buffers.clear()
        self._contexts.clear()
        self._tensors.clear()

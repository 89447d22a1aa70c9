"""Weights in backend buffers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.functions import MAX_DIMS, InitParams
from sam3d_gguf.runtime.ggml.host_memory import HEADROOM, require_memory, require_threads
from sam3d_gguf.runtime.weights import FILE_TYPES, Weights, WeightTensor
from sam3d_gguf.schemas.closing import Closing
from sam3d_gguf.schemas.errors import ContractError

GGML_TYPES: Mapping[str, int] = {"F32": 0, "F16": 1, "I8": 24, "I32": 26, "BF16": 30}
_USAGE_WEIGHTS = 1
_BLOCK_ELEMENTS = 1 << 18
"""Few enough for a core's cache."""

_SPAN_ELEMENTS = 1 << 23
_MAX_READERS = 4
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


def _widen(values: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> None:
    """BF16 bits, or F16, to the same values in F32."""
    if values.dtype == np.uint16:
        np.left_shift(values, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[:] = values


class DeviceTensors(Closing):
    """Tensors in one buffer of the device, by name.

    Attributes:
        size: bytes on the device.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._tensors: dict[str, Tensor] = {}
        self._context = 0
        self._buffer = 0
        self.size = 0

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def _allocate(self, planned: Collection[_Planned], purpose: str) -> None:
        if not planned:
            return
        backend, library = self._backend, self._backend.library
        context = self._context = new_context(backend, len(planned))
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
        backend.check_memory(size, purpose)
        buffer = library.pointer(
            "ggml_backend_alloc_ctx_tensors_from_buft", context, backend.buffer_type
        )
        self._buffer = buffer
        library.call("ggml_backend_buffer_set_usage", buffer, _USAGE_WEIGHTS)
        self.size = int(library.call("ggml_backend_buffer_get_size", buffer))

    def _set(self, planned: _Planned, start: int, values: npt.NDArray[Any]) -> None:
        self._backend.library.call(
            "ggml_backend_tensor_set",
            self._tensors[planned.name].address,
            int(values.ctypes.data),
            start * FILE_TYPES[planned.type].itemsize,
            values.nbytes,
        )

    def close(self) -> None:
        """Frees the buffer; graphs that use it must be closed before."""
        library = self._backend.library
        if self._buffer:
            library.call("ggml_backend_buffer_free", self._buffer)
        if self._context:
            library.call("ggml_free", self._context)
        self._buffer = self._context = 0
        self._tensors.clear()


class KeptTensors(DeviceTensors):
    """Float32 tensors that stay on the device from one run of a graph to the next."""

    def __init__(
        self, backend: Backend, shapes: Mapping[str, tuple[int, ...]], purpose: str
    ) -> None:
        """Reserves their memory; `write` gives them values.

        Raises:
            BackendError: a tensor is larger than the device allows, or memory is too small.
        """
        super().__init__(backend)
        try:
            self._allocate([_Planned(*item, "F32") for item in shapes.items()], purpose)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, values: npt.NDArray[np.float32]) -> None:
        """Sets a tensor.

        Raises:
            BackendError: the values have another shape.
        """
        shape = self._tensors[name].shape
        if values.shape != shape:
            raise BackendError(f"{name} has the shape {values.shape}", expected=str(shape))
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        self._set(_Planned(name, shape, "F32"), 0, flat)


class WeightStore(DeviceTensors):
    """The tensors that a model's graphs read, on the device, loaded once.

    With strict-F32 precision BF16 and F16 become F32 (exact), because libggml would round the
    other operand of a product down to their type.

    Attributes:
        size: bytes on the device.
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
            InputError: the file was changed since it was opened, or can't be read.
        """
        super().__init__(backend)
        self._weights = weights
        arrays = derived or {}
        planned = {name: self._planned(weights.tensor(name)) for name in names}
        planned |= {name: _Planned(name, array.shape, "F32") for name, array in arrays.items()}
        try:
            self._allocate(planned.values(), "the weights")
            for name, array in arrays.items():
                self._set(planned[name], 0, array.reshape(-1))
            self._read([each for name, each in planned.items() if name not in arrays])
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ContractError(f"the tensor {name} is missing", where=str(self._weights.path))
        return tensor

    def _planned(self, tensor: WeightTensor) -> _Planned:
        matrix = tensor.name.endswith("weight") and len(tensor.shape) >= 2
        narrow = tensor.type in ("BF16", "F16")
        wide = narrow and (self._backend.precision != "fast" or not matrix)
        return _Planned(tensor.name, tensor.shape, "F32" if wide else tensor.type)

    def _read(self, planned: Collection[_Planned]) -> None:
        """Fills tensors from the file; with the threads of the CPU backend where it is that."""
        if not planned:
            return
        host = bool(self._backend.library.call("ggml_backend_buffer_is_host", self._buffer))
        fill = self._fill_memory if host else self._fill_device

        def work(span: tuple[_Planned, int, int]) -> None:
            fill(*span)

        spans = [
            (each, start, min(start + _SPAN_ELEMENTS, math.prod(each.shape)))
            for each in planned
            for start in range(0, math.prod(each.shape), _SPAN_ELEMENTS)
        ]
        readers = min(self._backend.threads, _MAX_READERS)
        require_threads(readers)
        with ThreadPoolExecutor(readers) as pool:
            for _ in pool.map(work, spans):
                pass

    def _fill_memory(self, planned: _Planned, start: int, end: int) -> None:
        itemsize = FILE_TYPES[planned.type].itemsize
        address = self._backend.library.pointer(
            "ggml_get_data", self._tensors[planned.name].address
        )
        memory = (ctypes.c_uint8 * ((end - start) * itemsize)).from_address(
            address + start * itemsize
        )
        target = np.frombuffer(memoryview(memory), FILE_TYPES[planned.type])
        if planned.type == self._weights.tensor(planned.name).type:
            self._weights.read_into(planned.name, start, target)
            return
        for first, values in self._blocks(planned, start, end):
            _widen(values, target[first - start :][: values.size])

    def _fill_device(self, planned: _Planned, start: int, end: int) -> None:
        wide = np.empty(_BLOCK_ELEMENTS, np.float32)
        for first, values in self._blocks(planned, start, end):
            if planned.type == self._weights.tensor(planned.name).type:
                self._set(planned, first, values)
            else:
                _widen(values, wide[: values.size])
                self._set(planned, first, wide[: values.size])

    def _blocks(
        self, planned: _Planned, start: int, end: int
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """The values as stored, each with the number of its first, in memory that is reused."""
        stored = FILE_TYPES[self._weights.tensor(planned.name).type]
        block = np.empty(min(_BLOCK_ELEMENTS, end - start), stored)
        for first in range(start, end, _BLOCK_ELEMENTS):
            values = block[: end - first]
            self._weights.read_into(planned.name, first, values)
            yield first, values

"""A tensor's elements from its file, in C order and in blocks of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.tensor_ref import TensorRef
from sam3d_gguf.schemas.errors import InputError

MAX_BLOCK_BYTES = 64 << 20
_SPARSEST = 64  # a gather may read this many times the bytes that it keeps
_SMALL_SPAN = 64 << 10  # or this many bytes, whatever it keeps

NUMPY_DTYPE: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "BF16": np.dtype("<u2"),
        "F16": np.dtype("<f2"),
        "F32": np.dtype("<f4"),
        "F64": np.dtype("<f8"),
        "I8": np.dtype("i1"),
        "I16": np.dtype("<i2"),
        "I32": np.dtype("<i4"),
        "I64": np.dtype("<i8"),
        "U8": np.dtype("u1"),
        "BOOL": np.dtype("u1"),
    }
)
"""The NumPy dtype of a block; BF16 as its bits, BOOL as bytes that are 0 or 1."""


def iter_blocks(
    source: ByteSource,
    tensor: TensorRef,
    max_bytes: int = MAX_BLOCK_BYTES,
    buffers: Sequence[memoryview] | None = None,
) -> Iterator[NDArray[Any]]:
    """Yield a tensor's elements as 1-D blocks in C order, each of at most `max_bytes`.

    A tensor without elements yields nothing; a 0-d tensor one block of one element. A block lies in
    a buffer that a later block reuses: with the default single buffer, the next one.

    Args:
        source: the file that `tensor` refers to.
        tensor: where the elements lie.
        max_bytes: the size of a block, at least one element.
        buffers: writable memory to use in turn, each of at least min(max_bytes, tensor.nbytes).

    Raises:
        InputError: the file could not be read, or a BOOL tensor holds another byte than 0 or 1.
    """
    if tensor.elements == 0:
        return
    size = max(1, min(max_bytes // tensor.itemsize, tensor.elements))
    memory = buffers or [memoryview(bytearray(size * tensor.itemsize))]
    flat = tensor.is_contiguous
    fill = _read_run if flat else _Gather(max_bytes).fill
    for index, box in enumerate(_boxes((tensor.elements,) if flat else tensor.shape, size)):
        block = np.frombuffer(memory[index % len(memory)], NUMPY_DTYPE[tensor.dtype], box.elements)
        fill(source, tensor, box, block)
        if tensor.dtype == "BOOL" and block.max() > 1:
            raise InputError(
                f"the tensor {tensor.name!r} of dtype BOOL holds the byte {block.max()}",
                where=source.name,
                expected="0 or 1",
            )
        yield block


def upcast(
    block: NDArray[Any], dtype: str, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Return a block's elements as F32, each with exactly its value.

    Args:
        block: 1-D, as `iter_blocks` yields it.
        dtype: BF16, F16 or F32.
        out: memory for the result, of the block's size or more.

    Raises:
        InputError: the dtype's values don't all fit into F32.
    """
    if dtype == "F32":
        return block
    if dtype not in ("BF16", "F16"):
        raise InputError(f"{dtype} does not widen to F32 exactly", expected="BF16, F16 or F32")
    wide = np.empty(block.size, np.float32) if out is None else out[: block.size]
    if dtype == "F16":
        np.copyto(wide, block)
        return wide
    bits = wide.view(np.uint32)
    np.copyto(bits, block)
    np.left_shift(bits, 16, out=bits)
    return wide


@dataclass(frozen=True, slots=True)
class _Box:
    """A run of a tensor's elements in C order that is also a box of its index space."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def _boxes(shape: tuple[int, ...], size: int) -> Iterator[_Box]:
    """Split an index space into boxes of at most `size` elements, in C order."""
    axis, tail = len(shape), 1
    while axis > 0 and tail * shape[axis - 1] <= size:
        axis -= 1
        tail *= shape[axis]
    if axis == 0:
        yield _Box((0,) * len(shape), shape)
        return
    axis -= 1
    rows = size // tail
    rest = shape[axis + 1 :]
    for leading in product(*map(range, shape[:axis])):
        for row in range(0, shape[axis], rows):
            start = (*leading, row, *(0 for _ in rest))
            yield _Box(start, (*(1 for _ in leading), min(rows, shape[axis] - row), *rest))


def _read_run(source: ByteSource, tensor: TensorRef, box: _Box, block: NDArray[Any]) -> None:
    offset = tensor.file_offset + box.start[0] * tensor.itemsize
    source.pread_into(offset, block.data)


class _Gather:
    """Collects a box of a strided view by reads that each span some of its axes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max(max_bytes, _SMALL_SPAN)
        self._scratch = bytearray()

    def fill(self, source: ByteSource, tensor: TensorRef, box: _Box, block: NDArray[Any]) -> None:
        """Fill `block` with the box's elements in C order."""
        inner, span = self._inner_axes(tensor, box)
        outer = [axis for axis in range(len(box.shape)) if axis not in inner]
        if len(self._scratch) < span * tensor.itemsize:
            self._scratch = bytearray(span * tensor.itemsize)
        view = np.ndarray(
            tuple(box.shape[axis] for axis in inner),
            block.dtype,
            buffer=self._scratch,
            strides=tuple(tensor.strides[axis] * tensor.itemsize for axis in inner),
        )
        target = block.reshape(box.shape).transpose(*outer, *inner)
        run = memoryview(self._scratch)[: span * tensor.itemsize]
        for index in product(*(range(box.shape[axis]) for axis in outer)):
            place = list(box.start)
            for axis, step in zip(outer, index, strict=True):
                place[axis] += step
            first = sum(at * stride for at, stride in zip(place, tensor.strides, strict=True))
            source.pread_into(tensor.file_offset + first * tensor.itemsize, run)
            target[index] = view

    def _inner_axes(self, tensor: TensorRef, box: _Box) -> tuple[list[int], int]:
        """Choose the axes, nearest neighbours first, that one read spans; and its elements."""
        inner: list[int] = []
        span = kept = 1
        for axis in sorted(range(len(box.shape)), key=lambda axis: tensor.strides[axis]):
            size, stride = box.shape[axis], tensor.strides[axis]
            wider = span + (size - 1) * stride
            kept *= size if stride else 1
            nbytes = wider * tensor.itemsize
            if nbytes > self._max_bytes or (nbytes > _SMALL_SPAN and wider > kept * _SPARSEST):
                break
            inner.append(axis)
            span = wider
        return sorted(inner), span

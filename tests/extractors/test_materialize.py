"""Blocks hold the elements that the view's own formula names, whatever the view and block size."""

from __future__ import annotations

import itertools
import math
import os
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_source import memory_source
from numpy.typing import NDArray

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.materialize import NUMPY_DTYPE, iter_blocks, upcast
from sam3d_gguf.extractors.tensor_ref import ITEMSIZE, StorageRef, TensorRef
from sam3d_gguf.schemas.errors import InputError

PREFIX = b"bytes before the storage"


def tensor(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int = 0,
    dtype: str = "I32",
    elements: int = 1 << 20,
) -> TensorRef:
    storage = StorageRef("0", "data/0", len(PREFIX), elements * ITEMSIZE[dtype])
    return TensorRef("tensor", dtype, shape, strides, storage, offset)


def places(ref: TensorRef) -> list[int]:
    """The element of the storage at each index, in C order, by the definition of a view."""
    return [
        ref.storage_offset + sum(i * step for i, step in zip(index, ref.strides, strict=True))
        for index in itertools.product(*map(range, ref.shape))
    ]


def gathered(source: ByteSource, ref: TensorRef, max_bytes: int) -> bytes:
    blocks = [block.tobytes() for block in iter_blocks(source, ref, max_bytes)]
    assert all(0 < len(block) <= max(max_bytes, ref.itemsize) for block in blocks)
    return b"".join(blocks)


sizes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@given(st.data(), sizes, st.integers(0, 9), st.integers(1, 200))
def test_any_view_is_gathered(
    draw: st.DataObject, shape: tuple[int, ...], offset: int, max_bytes: int
) -> None:
    strides = tuple(draw.draw(st.integers(0, 40)) for _ in shape)
    ref = tensor(shape, strides, offset)
    values = np.arange(2_000, dtype="<i4")

    with memory_source(PREFIX + values.tobytes()) as source:
        assert gathered(source, ref, max_bytes) == values[places(ref)].tobytes()


WIDE = 1 << 20


@pytest.mark.parametrize("max_bytes", [100, 5_000, 1 << 20, 1 << 26])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((20, 3), (50_000, 1)),
        ((3, 20), (1, 50_000)),
        ((2, 5, 3), (500_000, 1, 100_000)),
        ((5, 2, 4), (0, 300_000, 70_000)),
        ((40, 500), (1, 1_000)),
        ((1_000, 40), (1, 20_000)),
        ((7,), (140_000,)),
        ((3, 4, 5), (20, 5, 1)),
    ],
)
def test_views_of_large_storages_are_gathered(
    shape: tuple[int, ...], strides: tuple[int, ...], max_bytes: int
) -> None:
    values = np.arange(WIDE, dtype="<i4")
    ref = tensor(shape, strides, 7)

    with memory_source(PREFIX + values.tobytes()) as source:
        assert gathered(source, ref, max_bytes) == values[places(ref)].tobytes()


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_dtype_has_its_width(dtype: str) -> None:
    ref = tensor((3, 2), (1, 3), 1, dtype)
    data = bytes(index % 2 for index in range(80))
    size = ITEMSIZE[dtype]

    with memory_source(PREFIX + data) as source:
        blocks = [block.copy() for block in iter_blocks(source, ref)]

    assert [block.dtype for block in blocks] == [NUMPY_DTYPE[dtype]]
    expected = b"".join(data[at * size : (at + 1) * size] for at in places(ref))
    assert blocks[0].tobytes() == expected


def test_tensors_without_elements_give_nothing() -> None:
    with memory_source(b"") as source:
        assert list(iter_blocks(source, tensor((0,), (1,)))) == []
        assert list(iter_blocks(source, tensor((3, 0, 2), (0, 2, 1)))) == []


def test_a_scalar_is_one_element() -> None:
    with memory_source(PREFIX + bytes(8) + b"\7\0\0\0") as source:
        blocks = list(iter_blocks(source, tensor((), (), 2)))

    assert [block.tolist() for block in blocks] == [[7]]


def test_contiguous_tensors_are_read_straight_into_the_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[tuple[int, int]] = []
    values = np.arange(100, dtype="<i4")
    with memory_source(PREFIX + values.tobytes()) as source:
        pread_into = source.pread_into

        def record(_source: ByteSource, offset: int, buffer: memoryview) -> None:
            reads.append((offset - len(PREFIX), buffer.nbytes))
            pread_into(offset, buffer)

        monkeypatch.setattr(ByteSource, "pread_into", record)
        buffer = memoryview(bytearray(120))
        blocks = [
            block[0] for block in iter_blocks(source, tensor((10, 7), (7, 1), 3), 120, [buffer])
        ]

    assert reads == [(12, 120), (132, 120), (252, 40)]
    assert blocks == [3, 33, 63]
    assert bytes(buffer[:4]) == (63).to_bytes(4, "little")


def test_buffers_are_used_in_turn() -> None:
    values = np.arange(8, dtype="<i4")
    buffers = [memoryview(bytearray(8)) for _ in range(3)]

    with memory_source(PREFIX + values.tobytes()) as source:
        blocks = list(iter_blocks(source, tensor((8,), (1,)), 8, buffers))

    assert [block.tolist() for block in blocks] == [[6, 7], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("strides", [(1,), (2,)])
def test_a_bool_is_0_or_1(strides: tuple[int, ...]) -> None:
    ref = tensor((3,), strides, dtype="BOOL")

    with memory_source(PREFIX + b"\1\0\1\0\0") as source:
        assert [block.tolist() for block in iter_blocks(source, ref)]
    with (
        memory_source(PREFIX + b"\1\2\2\0\0") as source,
        pytest.raises(InputError, match="'tensor' of dtype BOOL holds the byte 2"),
    ):
        list(iter_blocks(source, ref))


def test_a_file_that_shrinks_is_noticed() -> None:
    with memory_source(PREFIX + bytes(400)) as source:
        os.ftruncate(source.fd, 100)
        for strides in ((1,), (2,)):
            with pytest.raises(InputError, match="ends at byte 100"):
                list(iter_blocks(source, tensor((50,), strides)))


BITS = np.arange(1 << 16, dtype="<u2")


def test_bf16_widens_exactly() -> None:
    expected = b"".join(bytes(2) + struct.pack("<H", bits) for bits in range(1 << 16))

    assert upcast(BITS, "BF16").tobytes() == expected


def test_f16_widens_exactly() -> None:
    widened = upcast(BITS.view("<f2"), "F16")

    for bits, value in zip(range(1 << 16), widened.tolist(), strict=True):
        expected: float = struct.unpack("<e", struct.pack("<H", bits))[0]
        assert value == expected or (math.isnan(value) and math.isnan(expected))
        assert math.copysign(1, value) == math.copysign(1, expected)


def test_widening_fills_the_memory_it_is_given() -> None:
    out: NDArray[np.float32] = np.full(5, 9, np.float32)

    widened = upcast(np.array([0x3F80, 0xBF80], "<u2"), "BF16", out)

    assert np.shares_memory(widened, out)
    assert out.tolist() == [1, -1, 9, 9, 9]


def test_f32_is_itself() -> None:
    values = np.arange(3, dtype="<f4")

    assert upcast(values, "F32") is values


@pytest.mark.parametrize("dtype", ["F64", "I64", "BOOL", "U8"])
def test_nothing_else_widens(dtype: str) -> None:
    with pytest.raises(InputError, match="does not widen"):
        upcast(np.zeros(1, NUMPY_DTYPE[dtype]), dtype)


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [
        ((), (), True),
        ((3,), (1,), True),
        ((3,), (2,), False),
        ((1,), (9,), True),
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((2, 3), (4, 1), False),
        ((2, 3), (0, 1), False),
        ((1, 3, 1), (7, 1, 9), True),
        ((0, 3), (1, 1), True),
    ],
)
def test_contiguous_means_c_order_without_gaps(
    shape: tuple[int, ...], strides: tuple[int, ...], contiguous: bool
) -> None:
    assert tensor(shape, strides).is_contiguous is contiguous

"""Reads give exactly the bytes asked for, or an error that says why not."""

from __future__ import annotations

import os

import pytest
from memory_source import memory_source

from sam3d_gguf.schemas.errors import InputError


def test_ranges_inside_the_file_are_read() -> None:
    with memory_source(b"0123456789") as source:
        buffer = bytearray(4)
        source.pread_into(3, memoryview(buffer))

        assert source.size == 10
        assert buffer == b"3456"
        assert source.pread(0, 10) == b"0123456789"
        assert source.pread(10, 0) == b""


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 11), (10, 1), (11, 0), (-1, 1), (3, -1), (2**80, 1)]
)
def test_ranges_outside_the_file_are_refused(offset: int, size: int) -> None:
    refusal = pytest.raises(InputError, match=r"model\.ckpt: bytes .* outside the file of 10 bytes")
    with memory_source(b"0123456789", "model.ckpt") as source, refusal:
        source.pread(offset, size)


def test_a_file_that_shrinks_is_noticed() -> None:
    with memory_source(b"0123456789") as source:
        os.ftruncate(source.fd, 5)

        with pytest.raises(InputError, match="ends at byte 5, but had 10 bytes"):
            source.pread(0, 10)
        with pytest.raises(InputError, match="ends at byte 7"):
            source.pread_into(7, memoryview(bytearray(2)))


def test_elements_wider_than_a_byte_are_filled_whole() -> None:
    with memory_source(b"\1\0\0\0\2\0\0\0") as source:
        buffer = memoryview(bytearray(8)).cast("I")
        source.pread_into(0, buffer)

        assert buffer.tolist() == [1, 2]


def test_an_unreadable_descriptor_is_an_error_of_the_input() -> None:
    fd = os.memfd_create("input")
    try:
        with memory_source(b"0123") as source:
            source.fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
            with pytest.raises(InputError, match="could not be read at byte 1"):
                source.pread(1, 2)
            with pytest.raises(InputError, match="could not be read at byte 1"):
                source.pread_into(1, memoryview(bytearray(2)))
            os.close(source.fd)
    finally:
        os.close(fd)

"""Digests on threads: equal to plain hashlib, each byte read once, errors not lost."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.hashing import ParallelHasher, Readable, Region, hash_file
from sam3d_gguf.schemas.errors import InputError


@pytest.fixture
def descriptor() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


class CountingSource(ByteSource):
    """Remembers every byte that is read."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "counted")
        self.reads: list[int] = []

    def pread_into(self, offset: int, buffer: memoryview) -> None:
        self.reads.extend(range(offset, offset + len(buffer)))
        super().pread_into(offset, buffer)


@given(
    st.binary(max_size=300),
    st.lists(st.integers(0, 300), max_size=8, unique=True).map(sorted),
    st.integers(1, 40),
)
def test_one_reading_gives_the_digests_of_the_file_and_of_its_regions(
    data: bytes, cuts: list[int], block_bytes: int
) -> None:
    cuts = [cut for cut in cuts if cut <= len(data)]
    regions = [Region(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    seen = [b""] * len(regions)

    def on_region(index: int, block: memoryview) -> None:
        seen[index] += bytes(block)

    fd = os.memfd_create("test")
    try:
        os.write(fd, data)
        source = CountingSource(fd)
        digests = hash_file(source, regions, on_region=on_region, block_bytes=block_bytes)
    finally:
        os.close(fd)

    parts = [data[region.offset : region.end] for region in regions]
    assert digests.sha256 == hashlib.sha256(data).hexdigest()
    assert digests.regions == tuple(hashlib.sha256(part).hexdigest() for part in parts)
    assert seen == parts
    assert source.reads == list(range(len(data)))


def test_progress_adds_up_to_the_size(descriptor: int) -> None:
    os.write(descriptor, bytes(100))
    done: list[int] = []

    hash_file(ByteSource(descriptor), [Region(10, 50)], progress=done.append, block_bytes=16)

    assert sum(done) == 100
    assert max(done) == 16


@pytest.mark.parametrize(
    "regions",
    [
        [Region(0, 101)],
        [Region(-1, 5)],
        [Region(0, -1)],
        [Region(0, 10), Region(9, 10)],
        [Region(20, 10), Region(0, 10)],
    ],
)
def test_regions_out_of_order_or_bounds_are_refused(descriptor: int, regions: list[Region]) -> None:
    os.write(descriptor, bytes(100))

    with pytest.raises(InputError, match="overlaps another, or lies outside"):
        hash_file(ByteSource(descriptor), regions)


def test_blocks_are_reused_only_after_they_are_hashed() -> None:
    expected = hashlib.sha256()
    digest = hashlib.sha256()
    with ParallelHasher(1, depth=2, block_bytes=1 << 16) as hasher:
        for value in range(100):
            block = hasher.block()
            block[:] = bytes([value]) * len(block)
            expected.update(bytes(block))
            hasher.update(0, digest, block)
        hasher.wait()

    assert digest.hexdigest() == expected.hexdigest()


class BrokenDigest:
    def update(self, data: Readable, /) -> None:
        raise RuntimeError("broken")

    def hexdigest(self) -> str:
        return ""


def test_an_error_on_a_thread_reaches_the_caller() -> None:
    with ParallelHasher(2) as hasher:
        hasher.update(1, BrokenDigest(), b"data")
        with pytest.raises(RuntimeError, match="broken"):
            hasher.wait()


def test_an_error_on_a_thread_stops_a_long_stream() -> None:
    with ParallelHasher(1, depth=3) as hasher, pytest.raises(RuntimeError, match="broken"):
        for _ in range(4):
            hasher.update(0, BrokenDigest(), b"data")
            hasher.advance()

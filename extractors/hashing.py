"""SHA-256 beside the work: digests run on threads while the caller reads, converts and writes.

`hashlib` releases the interpreter lock, so a file's digest and its tensors' digests can be computed
at the same time, from one reading, while the next block is being fetched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.schemas.closing import Closing
from sam3d_gguf.schemas.errors import InputError

BLOCK_BYTES = 16 << 20
Readable: TypeAlias = bytes | bytearray | memoryview
Progress: TypeAlias = Callable[[int], None]


class Digest(Protocol):
    """What is used of a `hashlib` object."""

    def update(self, data: Readable, /) -> None:
        """Adds data."""
        ...

    def hexdigest(self) -> str:
        """Returns the digest so far in hexadecimal."""
        ...


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes [offset, offset + size) of a file."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """Offset of the first byte after the region."""
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class FileDigests:
    """SHA-256, in hexadecimal, of a whole file and of each region asked for."""

    sha256: str
    regions: tuple[str, ...]


class ParallelHasher(Closing):
    """Updates digests on `lanes` threads, each in the order it was given its work.

    A lane may be used for many digests; a digest must stay on one lane. Data given to `update`
    must not change until `depth` calls of `advance` or `block` later, when it is known to be
    hashed; both wait for that. So at most `depth` blocks are alive at any time.

    Args:
        lanes: number of threads.
        depth: blocks in flight, the current one included.
        block_bytes: size of the reused blocks that `block` returns.
    """

    def __init__(self, lanes: int, depth: int = 4, block_bytes: int = BLOCK_BYTES) -> None:
        self._executors = [ThreadPoolExecutor(1, f"sha256-{lane}") for lane in range(lanes)]
        self._pending: list[list[Future[None]]] = [[] for _ in range(depth)]
        self._blocks: list[memoryview | None] = [None] * depth
        self._block_bytes = block_bytes
        self._current = 0

    def update(self, lane: int, digest: Digest, data: Readable) -> None:
        """Adds data to a digest, on the thread of the lane."""
        self._pending[self._current].append(self._executors[lane].submit(digest.update, data))

    def advance(self) -> None:
        """Moves to the next block, once the one that had its place is hashed.

        Raises:
            Exception: whatever an update raised on its thread.
        """
        self._current = (self._current + 1) % len(self._pending)
        self._finish(self._pending[self._current])

    def block(self) -> memoryview:
        """Moves to the next block like `advance`, and returns `block_bytes` of memory for it."""
        self.advance()
        block = self._blocks[self._current]
        if block is None:
            block = self._blocks[self._current] = memoryview(bytearray(self._block_bytes))
        return block

    def wait(self) -> None:
        """Returns when everything given is hashed.

        Raises:
            Exception: whatever an update raised on its thread.
        """
        for pending in self._pending:
            self._finish(pending)

    @staticmethod
    def _finish(pending: list[Future[None]]) -> None:
        while pending:
            pending.pop().result()

    def close(self) -> None:
        """Ends the threads; what is waiting is not hashed."""
        for executor in self._executors:
            executor.shutdown(wait=True, cancel_futures=True)


def hash_file(
    source: ByteSource,
    regions: Sequence[Region] = (),
    *,
    on_region: Callable[[int, memoryview], None] | None = None,
    progress: Progress | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> FileDigests:
    """Reads a file once, and returns its SHA-256 and that of each region.

    Args:
        source: the file; every byte of `source.size` is read.
        regions: inside the file, by offset, without overlap.
        on_region: called with the region's index and a block of it, in order, as the bytes are
            read; a block starts at the region's start or a multiple of `block_bytes` after it, and
            is valid during the call only.
        progress: called with the number of bytes done since the last call.
        block_bytes: bytes read at a time, a multiple of every element size.

    Raises:
        InputError: the regions overlap or lie outside the file, or it can't be read.
    """
    whole = hashlib.sha256()
    digests = [hashlib.sha256() for _ in regions]
    with ParallelHasher(2, block_bytes=block_bytes) as hasher:
        for index, span in _spans(source, regions):
            for start in range(span.offset, span.end, block_bytes):
                block = hasher.block()[: min(block_bytes, span.end - start)]
                source.pread_into(start, block)
                hasher.update(0, whole, block)
                if index is not None:
                    hasher.update(1, digests[index], block)
                    if on_region is not None:
                        on_region(index, block)
                if progress is not None:
                    progress(len(block))
        hasher.wait()
    return FileDigests(whole.hexdigest(), tuple(digest.hexdigest() for digest in digests))


def _spans(source: ByteSource, regions: Iterable[Region]) -> Iterator[tuple[int | None, Region]]:
    """Yields the regions, with their index, and what lies between them, so that all is covered."""
    position = 0
    for index, region in enumerate(regions):
        if region.size < 0 or not position <= region.offset <= source.size - region.size:
            raise InputError(
                f"the region of {region.size} bytes at {region.offset} overlaps another, "
                "or lies outside the file",
                where=source.name,
            )
        yield None, Region(position, region.offset - position)
        yield index, region
        position = region.end
    yield None, Region(position, source.size - position)

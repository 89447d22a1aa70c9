"""Large files past the page cache, where the file system can do that (O_DIRECT).

Copying gigabytes into the page cache costs more processor time than hashing them, and what is read
back from there says nothing about the disk. Where O_DIRECT is not to be had, the same bytes go the
ordinary way.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.schemas.closing import Closing

ALIGNMENT = 4096
"""Of offsets, sizes and memory: enough for the devices in use, and EINVAL tells where it is not."""

BUFFER_BYTES = 16 << 20
_BUFFERS = 2


def open_direct(path: str, flags: int) -> int | None:
    """Opens a file for direct transfers; None where that is not possible."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


def reopen_direct(fd: int, flags: int) -> int | None:
    """Opens the file behind a descriptor once more, for direct transfers; None as above."""
    return open_direct(f"/proc/self/fd/{fd}", flags)


def forget(fd: int, offset: int = 0, size: int = 0) -> None:
    """Asks the kernel to write out a range (0 bytes: to the end) and to drop its cached pages."""
    # Best effort: some file systems don't take the advice.
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)


class StreamWriter(Closing):
    """Writes a file in large aligned pieces, on a thread, while the caller makes the next one.

        with StreamWriter(fd, reopen_direct(fd, os.O_WRONLY)) as writer:
            writer.write_at(offset, data)
            writer.flush()

    Writes that follow one another are joined. What was given is in the file only after `flush`;
    without it, it may be missing.

    Args:
        fd: open for writing; it is not closed here.
        direct: another descriptor of the same file, for direct transfers, which is closed here.
    """

    def __init__(self, fd: int, direct: int | None) -> None:
        self._fd = fd
        self._direct = direct
        self._refused = False
        self._executor = ThreadPoolExecutor(1, "writer")
        self._pending: list[Future[None] | None] = [None] * _BUFFERS
        self._buffers: list[memoryview | None] = [None] * _BUFFERS
        self._current = 0
        # The current buffer stands for the file from `base` on, and holds bytes from low to high.
        self._base: int = 0
        self._low: int = 0
        self._high: int = 0

    def write_at(self, offset: int, data: memoryview) -> None:
        """Takes data for an offset; it may be changed afterwards.

        Raises:
            OSError: some write so far has failed.
        """
        if offset != self._base + self._high:
            self._submit()
            self._low = self._high = offset % ALIGNMENT
            self._base = offset - self._low
        while data:
            buffer = self._buffer()
            count = min(len(data), BUFFER_BYTES - self._high)
            buffer[self._high : self._high + count] = data[:count]
            self._high += count
            data = data[count:]
            if self._high == BUFFER_BYTES:
                self._submit()

    def flush(self) -> None:
        """Returns when all is written.

        Raises:
            OSError: some write has failed.
        """
        self._submit()
        for number in range(_BUFFERS):
            self._wait(number)

    def _buffer(self) -> memoryview:
        # Anonymous mappings start on a page, as direct transfers want it.
        buffer = self._buffers[self._current]
        if buffer is None:
            buffer = self._buffers[self._current] = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        return buffer

    def _submit(self) -> None:
        """Hands the current buffer to the thread, and waits for the next one."""
        if self._low < self._high:
            piece = self._buffer()[self._low : self._high]
            task = self._executor.submit(self._put, self._base + self._low, piece)
            self._pending[self._current] = task
            self._current = (self._current + 1) % _BUFFERS
            self._wait(self._current)
        self._base += self._high
        self._low = self._high = 0

    def _wait(self, number: int) -> None:
        task, self._pending[number] = self._pending[number], None
        if task is not None:
            task.result()

    def _put(self, offset: int, piece: memoryview) -> None:
        end = offset + len(piece)
        first = min(end, -(-offset // ALIGNMENT) * ALIGNMENT)
        last = max(first, end // ALIGNMENT * ALIGNMENT)
        self._put_cached(offset, piece[: first - offset])
        self._put_direct(first, piece[first - offset : last - offset])
        self._put_cached(last, piece[last - offset :])

    def _put_direct(self, offset: int, piece: memoryview) -> None:
        while piece and self._direct is not None and not self._refused:
            try:
                count = os.pwrite(self._direct, piece, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._refused = True
            else:
                piece = piece[count:]
                offset += count
        if piece:
            self._put_cached(offset, piece)
            # Starts the write-out now, so that the last fsync doesn't wait for all of it.
            forget(self._fd, offset, len(piece))

    def _put_cached(self, offset: int, piece: memoryview) -> None:
        while piece:
            count = os.pwrite(self._fd, piece, offset)
            piece = piece[count:]
            offset += count

    def close(self) -> None:
        """Ends the thread and closes the descriptor for direct transfers."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


class DiskSource(ByteSource, Closing):
    """Reads a file from front to back from the disk itself, not from the kernel's memory of it.

    Only `pread_into` does; it is made for reads that follow one another, and fetches what comes next
    on a thread. Where the file system has no direct transfers, it reads the ordinary way.
    """

    __slots__ = ("_ahead", "_direct", "_executor", "_memory", "_start", "_window")

    def __init__(self, fd: int, name: str) -> None:
        super().__init__(fd, name)
        self._direct = reopen_direct(fd, os.O_RDONLY)
        self._executor = ThreadPoolExecutor(1, "reader")
        self._memory = [mmap.mmap(-1, BUFFER_BYTES) for _ in range(_BUFFERS)]
        self._window = memoryview(b"")
        self._start = 0
        self._ahead: tuple[int, Future[int]] | None = None

    def pread_into(self, offset: int, buffer: memoryview) -> None:
        """See `ByteSource.pread_into`."""
        view = buffer.cast("B")
        self._require(offset, view.nbytes)
        while view and self._direct is not None:
            at = offset - self._start
            if not 0 <= at < len(self._window):
                self._load(self._direct, offset)
                continue
            part = self._window[at : at + len(view)]
            view[: len(part)] = part
            view = view[len(part) :]
            offset += len(part)
        if view:
            super().pread_into(offset, view)

    def _load(self, direct: int, offset: int) -> None:
        """Takes the window that starts there or just before, begins to fetch the one behind it."""
        start = offset - offset % ALIGNMENT
        found = self._take(direct, start)
        try:
            count = found.result()
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise self._unreadable(start, error) from error
            self.close()
            return
        if start + count <= offset:
            raise self._shrunk(start + count)
        self._memory = [*self._memory[1:], self._memory[0]]
        self._window = memoryview(self._memory[-1])[:count]
        self._start = start
        following = start + BUFFER_BYTES
        if following < self.size:
            self._ahead = (following, self._fetch(direct, following))

    def _take(self, direct: int, start: int) -> Future[int]:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == start:
            return ahead[1]
        # What was fetched in vain has the same memory; the one thread is done with it first.
        return self._fetch(direct, start)

    def _fetch(self, direct: int, start: int) -> Future[int]:
        return self._executor.submit(os.preadv, direct, [self._memory[0]], start)

    def close(self) -> None:
        """Ends the thread and the direct transfers; what is read then goes the ordinary way."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        direct, self._direct = self._direct, None
        if direct is not None:
            os.close(direct)

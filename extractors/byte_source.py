"""Exact reads from one open file: the only way that a reader sees its input."""

from __future__ import annotations

import os
import stat

from sam3d_gguf.schemas.errors import InputError


class ByteSource:
    """A regular file behind a descriptor that the caller owns and keeps open.

    Reads are positional, so several readers may share one source. The size is taken once; a file
    that shrinks while it is read makes the next read past its end fail.

    Args:
        fd: a descriptor open for reading; it is not closed here.
        name: what to call the file in errors.

    Raises:
        InputError: the descriptor isn't a regular file.
    """

    __slots__ = ("fd", "name", "size")

    def __init__(self, fd: int, name: str = "input") -> None:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise InputError("is a directory", where=name, expected="a file")
        if not stat.S_ISREG(status.st_mode):
            raise InputError("isn't a regular file", where=name, expected="a regular file")
        self.fd = fd
        self.name = name
        self.size = status.st_size

    def pread(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`.

        Raises:
            InputError: the range is not wholly inside the file, or the file could not be read.
        """
        self._require(offset, size)
        data = self._read(offset, size)
        if len(data) == size:
            return data
        buffer = bytearray(size)
        self.pread_into(offset, memoryview(buffer))
        return bytes(buffer)

    def pread_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (contiguous, writable) with the bytes from `offset`.

        Raises:
            InputError: the range is not wholly inside the file, or the file could not be read.
        """
        view = buffer.cast("B")
        self._require(offset, view.nbytes)
        done = 0
        while done < view.nbytes:
            try:
                count = os.preadv(self.fd, [view[done:]], offset + done)
            except OSError as error:
                raise self._unreadable(offset + done, error) from error
            if count == 0:
                raise self._shrunk(offset + done)
            done += count

    def _read(self, offset: int, size: int) -> bytes:
        try:
            return os.pread(self.fd, size, offset)
        except OSError as error:
            raise self._unreadable(offset, error) from error

    def _require(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise InputError(
                f"bytes {offset} to {offset + size} lie outside the file of {self.size} bytes",
                where=self.name,
                expected="a complete file",
                action="Fetch the file again and compare its size and SHA-256 with the source's",
            )

    def _unreadable(self, offset: int, error: OSError) -> InputError:
        return InputError(
            f"could not be read at byte {offset}: {error.strerror}",
            where=self.name,
            action="Check the disk that holds it",
        )

    def _shrunk(self, offset: int) -> InputError:
        return InputError(
            f"ends at byte {offset}, but had {self.size} bytes when it was opened",
            where=self.name,
            expected="a file that nobody changes while it is read",
            action="Wait until the file is complete, then try again",
        )

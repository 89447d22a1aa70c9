"""Opens input files once: no link followed, regular files only, and a watch on later changes."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.schemas.closing import Closing
from sam3d_gguf.schemas.errors import InputError

# O_NONBLOCK: opening a named pipe must not wait for its writer. O_NOCTTY: nor a terminal become ours.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells a file, and one state of it, from others: device, inode, size, mtime in ns."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, fd: int) -> FileIdentity:
        """Returns the identity of an open file, as it is now."""
        status = os.fstat(fd)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class OpenedFile(Closing):
    """A regular file, open for reading until `close` or the end of a `with` block.

    Attributes:
        path: as it was given.
        fd: the descriptor, close-on-exec.
        identity: device, inode, size and modification time when it was opened.
        source: positional reads from the descriptor.
    """

    __slots__ = ("_touched_ns", "fd", "identity", "path", "source")

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.source = ByteSource(fd, str(path))
        self.identity = FileIdentity.of(fd)
        self.renew()

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        return self.identity.size

    def assert_unchanged(self) -> None:
        """Checks that nobody changed the file since it was opened.

        Raises:
            InputError: its size or modification time differ.
        """
        now = FileIdentity.of(self.fd)
        if now != self.identity:
            sizes = f"it had {self.size} bytes, now it has {now.size}"
            raise self._changed(f": {'its time differs' if now.size == self.size else sizes}")

    def assert_untouched(self) -> None:
        """Checks that nobody changed the file since it was opened, and set its time back.

        A change of its owner, mode or names counts as well: the file system tells no more.

        Raises:
            InputError: its size, modification time or time of status change (ctime) differ.
        """
        self.assert_unchanged()
        if os.fstat(self.fd).st_ctime_ns != self._touched_ns:
            raise self._changed()

    def renew(self) -> None:
        """Takes the file as untouched now, after a change of its owner or mode by this process."""
        self._touched_ns = os.fstat(self.fd).st_ctime_ns

    def _changed(self, how: str = "") -> InputError:
        return InputError(
            f"the file was changed while it was read{how}",
            where=str(self.path),
            expected="a file that nobody changes while it is read",
            action="Wait until the file is complete, then try again",
        )

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.fd)


def open_source(path: str | os.PathLike[str]) -> OpenedFile:
    """Opens an input file, once and for all of its uses.

    Symbolic links are followed in the folders of the path, never in its last component.

    Raises:
        InputError: it doesn't exist, can't be read, or is a link, folder, pipe, socket or device.
    """
    path = Path(path)
    try:
        fd = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:
        raise InputError(
            _refusal(path, error), where=str(path), expected="a regular file"
        ) from error
    try:
        kind = _kind(os.fstat(fd).st_mode)
        if kind is not None:
            raise InputError(f"this is {kind}", where=str(path), expected="a regular file")
        return OpenedFile(path, fd)
    except BaseException:
        os.close(fd)
        raise


def _kind(mode: int) -> str | None:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFLNK: "a symbolic link",
    }
    return kinds.get(stat.S_IFMT(mode))


def _refusal(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, ValueError):
        return "this is not a path"
    if error.errno in (errno.ELOOP, errno.ENXIO):
        # Neither errno says what is there; the answer is only worded by this look, not based on it.
        try:
            kind = _kind(path.lstat().st_mode)
        except OSError:
            kind = None
        if kind is not None:
            return f"this is {kind}"
    return f"the file can't be opened: {error.strerror}"

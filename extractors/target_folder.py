"""The folder that a new file will appear in: its errors in words, its space, its abilities."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from sam3d_gguf.extractors.litter import create_locked, unfinished_name
from sam3d_gguf.schemas.errors import OutputError

_NO_NAMELESS_FILES = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_REASONS = {
    errno.ENOSPC: ("the disk is full", "Free space there, or choose another folder"),
    errno.EDQUOT: ("the disk quota is used up", "Free space there, or choose another folder"),
    errno.EROFS: ("the file system is read-only", "Choose a folder that can be written to"),
    errno.EACCES: ("writing there is not permitted", "Choose a folder that you may write to"),
    errno.EPERM: ("writing there is not permitted", "Choose a folder that you may write to"),
    errno.ENOENT: ("the folder doesn't exist", "Create it, or choose another folder"),
    errno.ENOTDIR: ("a part of the path isn't a folder", "Choose another path"),
    errno.EEXIST: ("the destination exists already", "Remove it, or choose another path"),
    errno.ENOTEMPTY: ("the destination exists already", "Remove it, or choose another path"),
    errno.ENAMETOOLONG: ("the name is too long", "Choose a shorter name"),
    errno.EFBIG: ("a file this large is not accepted there", "Choose another file system"),
}


def output_error(error: OSError, path: str | os.PathLike[str], detail: str = "") -> OutputError:
    """Returns the error that tells what kept a file from being written, and what to do."""
    reason, action = _REASONS.get(error.errno or 0, (f"it can't be written: {error.strerror}", ""))
    return OutputError(f"{reason}{detail}", where=os.fspath(path), action=action)


def open_nameless(folder_fd: int) -> int | None:
    """Opens a new file without a name in a folder; None where the file system has no such files.

    Raises:
        OSError: it can't be created there.
    """
    try:
        return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666, dir_fd=folder_fd)
    except OSError as error:
        if error.errno in _NO_NAMELESS_FILES:
            return None
        raise


class TargetFolder:
    """An open folder that files will appear in."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError):
                raise OutputError("this is not a path", where=str(path)) from error
            raise output_error(error, path) from error
        status = os.fstat(self.fd)
        self.device = status.st_dev
        self.key = (status.st_dev, status.st_ino)

    def check_absent(self, destination: Path) -> None:
        """Raises OutputError where anything has the destination's name, a broken link included."""
        try:
            status = os.stat(destination.name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        except OSError as error:
            raise output_error(error, destination) from error
        kinds = {
            stat.S_IFREG: "a file",
            stat.S_IFLNK: "a symbolic link",
            stat.S_IFDIR: "a folder",
        }
        kind = kinds.get(stat.S_IFMT(status.st_mode))
        raise OutputError(
            f"the destination exists already: it is {kind or 'a device, pipe or socket'}",
            where=str(destination),
            action="Remove it, or choose another path" if kind else "Choose another path",
        )

    def check_space(self, destination: Path, size: int) -> None:
        """Raises OutputError where the file system has less than `size` bytes, or no inode, left."""
        space = os.fstatvfs(self.fd)
        free = space.f_bavail * space.f_frsize
        if free < size:
            raise OutputError(
                f"the disk has {free} bytes free",
                where=str(destination),
                expected=f"at least {size}",
                action=f"Free {size - free} bytes there, or choose another folder",
            )
        if space.f_files and not space.f_favail:
            raise OutputError("the file system has no inode free", where=str(destination))

    def create(self, destination: Path) -> tuple[int, str | None]:
        """Opens a new file in the folder; the name is None where it needs none.

        Raises:
            OutputError: it can't be created there, or the file system has no hard links.
        """
        try:
            fd = open_nameless(self.fd)
            if fd is not None:
                return fd, None
            fd, name = create_locked(self.fd, destination.name, "part")
        except OSError as error:
            if error.errno == errno.ENOENT:  # the folder is there: it is open
                raise OutputError(
                    "no file can be made in this folder",
                    where=str(destination),
                    action="Choose another folder",
                ) from error
            raise output_error(error, destination) from error
        self._check_links(name, destination)
        return fd, name

    def _check_links(self, name: str, destination: Path) -> None:
        second = unfinished_name(destination.name, "part")
        try:
            os.link(name, second, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
            os.unlink(second, dir_fd=self.fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self.fd)
            if error.errno in _NO_LINKS:
                raise OutputError(
                    "the file system has no hard links, which a file needs to appear in one step",
                    where=str(destination),
                    action="Choose a folder on another file system, and copy the files afterwards",
                ) from error
            raise output_error(error, destination) from error

    def close(self) -> None:
        """Closes the folder."""
        os.close(self.fd)

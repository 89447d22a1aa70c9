"""What a killed run leaves in a folder, and its removal by the next run there.

Everything unfinished is named `.NAME.sam3d-PID-RANDOM.part` (a file, or a scratch folder) or
`.NAME.sam3d-PID-RANDOM.journal`, and is locked with flock as long as its run lives: a lock that can
be had is proof that the run is gone, whatever its number is now used for.

A journal makes several links one step. It is on disk before the first link, names the files (base
names in its own folder, with inode, size and modification time), and is gone after the last. A
journal without a living run therefore means: remove the files that it names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from sam3d_gguf.extractors.sandbox.handover import UNPRIVILEGED
from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import (
    JsonInput,
    JsonValue,
    as_array,
    as_int,
    as_object,
    as_str,
    dumps,
    loads,
)

_PATTERN = re.compile(r"\..+\.sam3d-[0-9]+-[0-9a-f]{16}\.(?:part|journal)", re.DOTALL)
_NAME_BYTES = 150
_MAX_JOURNAL_BYTES = 1 << 20
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A file about to appear: its base name and what tells it from any other of that name."""

    name: str
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, name: str, fd: int) -> JournalEntry:
        """Returns the entry of an open file that will get this name."""
        status = os.fstat(fd)
        return cls(name, status.st_ino, status.st_size, status.st_mtime_ns)

    def matches(self, status: os.stat_result) -> bool:
        """Returns whether a file of that name is the one meant."""
        found = (status.st_ino, status.st_size, status.st_mtime_ns)
        return stat.S_ISREG(status.st_mode) and found == (self.inode, self.size, self.mtime_ns)


@dataclass(frozen=True, slots=True)
class Journal:
    """The files of one folder that appear together.

    Where files in several folders appear together, each folder has a journal. One is the primary:
    its removal is the moment from which the files stay. It names the other `folders`, and their
    journals name its path as `primary`.
    """

    files: tuple[JournalEntry, ...]
    primary: str | None = None
    folders: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """Returns the journal as a document, in which each character of a path is one of its bytes."""
        files: list[JsonInput] = [
            {"name": _bytes(e.name), "inode": e.inode, "size": e.size, "mtime_ns": e.mtime_ns}
            for e in self.files
        ]
        primary = None if self.primary is None else _bytes(self.primary)
        folders = [_bytes(folder) for folder in self.folders]
        return dumps({"files": files, "primary": primary, "folders": folders})

    @classmethod
    def from_json(cls, data: bytes) -> Journal:
        """Parses a journal.

        Raises:
            InputError: it isn't one, or names a file outside its own folder.
        """
        document = _fields(loads(data, where="journal"), {"files", "primary", "folders"})
        primary = document["primary"]
        return cls(
            tuple(_entry(value) for value in as_array(document["files"])),
            None if primary is None else _path(primary),
            tuple(_path(folder) for folder in as_array(document["folders"])),
        )


def _bytes(path: str) -> str:
    return os.fsencode(path).decode("latin-1")


def _path(value: JsonValue) -> str:
    try:
        return os.fsdecode(as_str(value).encode("latin-1"))
    except UnicodeEncodeError as error:
        raise InputError("this is no path", where="journal") from error


def _entry(value: JsonValue) -> JournalEntry:
    fields = _fields(value, {"name", "inode", "size", "mtime_ns"})
    name = _path(fields["name"])
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise InputError("this is not a base name", where="journal")
    numbers = (as_int(fields[key]) for key in ("inode", "size", "mtime_ns"))
    return JournalEntry(name, *numbers)


def _fields(value: JsonValue, keys: set[str]) -> dict[str, JsonValue]:
    fields = as_object(value, "journal")
    if fields.keys() != keys:
        raise InputError("this is not a journal", where="journal")
    return fields


def unfinished_name(name: str, kind: str) -> str:
    """Returns a new name for something unfinished; kind is `part` or `journal`."""
    stem = os.fsdecode(os.fsencode(name)[:_NAME_BYTES])
    return f".{stem}.sam3d-{os.getpid()}-{secrets.token_hex(8)}.{kind}"


def create_locked(folder_fd: int, name: str, kind: str) -> tuple[int, str]:
    """Creates a locked file in a folder, readable and writable, under an unfinished name.

    Returns:
        The descriptor and the file's base name. The lock lasts until the descriptor is closed.

    Raises:
        OSError: it can't be created there.
    """
    while True:
        unfinished = unfinished_name(name, kind)
        fd = os.open(unfinished, _CREATE, 0o666, dir_fd=folder_fd)
        # Another run's sweep may have seen the file before the lock was on it.
        if _lock(fd) and _is_named(folder_fd, unfinished, fd):
            return fd, unfinished
        os.close(fd)


@contextlib.contextmanager
def scratch_folder(parent: str | os.PathLike[str], name: str = "scratch") -> Generator[Path]:
    """Makes a private folder inside `parent` that is removed at the end of the `with` block.

    It lies on the file system of `parent`, so what is made in it can be published there. If this
    run is killed, the next one removes it. `name` is a part of its name.

    Raises:
        OSError: it can't be created there.
    """
    folder_fd = os.open(parent, _OPEN_FOLDER)
    try:
        sweep(folder_fd)
        unfinished, fd = _make_locked_folder(folder_fd, name)
        try:
            yield Path(parent).absolute() / unfinished
        finally:
            _remove_folder(folder_fd, unfinished, fd)
            os.close(fd)
    finally:
        os.close(folder_fd)


def _make_locked_folder(folder_fd: int, name: str) -> tuple[str, int]:
    while True:
        unfinished = unfinished_name(name, "part")
        os.mkdir(unfinished, 0o700, dir_fd=folder_fd)
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(unfinished, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=folder_fd)
            if _lock(fd) and _is_named(folder_fd, unfinished, fd):
                return unfinished, fd
            os.close(fd)


def sweep(folder_fd: int) -> None:
    """Removes from a folder what runs of the same user that are gone left unfinished there.

    What can't be removed is left: the folder's own errors belong to whoever writes there next.
    """
    _sweep(folder_fd, follow=True)


def _sweep(folder_fd: int, *, follow: bool) -> None:
    for name in os.listdir(folder_fd):
        if _PATTERN.fullmatch(name):
            with contextlib.suppress(OSError):
                _remove_if_abandoned(folder_fd, name, follow=follow)


def _remove_if_abandoned(folder_fd: int, name: str, *, follow: bool) -> None:
    fd = os.open(name, _OPEN, dir_fd=folder_fd)
    try:
        status = os.fstat(fd)
        if not (_is_ours(status) and _lock(fd) and _is_named(folder_fd, name, fd)):
            return
        if stat.S_ISDIR(status.st_mode):
            _remove_folder(folder_fd, name, fd)
        elif stat.S_ISREG(status.st_mode):
            if name.endswith(".journal"):
                _undo(folder_fd, fd, follow=follow)
            os.unlink(name, dir_fd=folder_fd)
    finally:
        os.close(fd)


def _remove_folder(parent_fd: int, name: str, fd: int) -> None:
    """Removes a folder with all in it, though who filled it took away folders' rights.

    One that no longer has this name was published, and stays as it is.
    """
    if not _is_named(parent_fd, name, fd):
        return
    with contextlib.suppress(OSError):
        os.fchmod(fd, stat.S_IRWXU)
        _empty_folder(fd)
        os.rmdir(name, dir_fd=parent_fd)


def _empty_folder(fd: int) -> None:
    """Removes all that is in a folder, however deep it nests: what lies deeper is first moved up."""
    pending = _unlink_files(fd)
    while pending:
        name = pending.pop()
        with contextlib.suppress(OSError):
            inside_fd = os.open(name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            try:
                for folder in _unlink_files(inside_fd):
                    moved = secrets.token_hex(16)
                    os.rename(folder, moved, src_dir_fd=inside_fd, dst_dir_fd=fd)
                    pending.append(moved)
            finally:
                os.close(inside_fd)
            os.rmdir(name, dir_fd=fd)


def _unlink_files(fd: int) -> list[str]:
    """Removes what lies in a folder but its folders, and returns their names; all may be entered."""
    folders: list[str] = []
    with os.scandir(fd) as entries:
        found = list(entries)
    for entry in found:
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.name, stat.S_IRWXU, dir_fd=fd)
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=fd)
    return folders


def _is_ours(status: os.stat_result) -> bool:
    """Whether a run of this user made it; root's runs lend their folders to an unprivileged user."""
    user = os.geteuid()
    return status.st_uid == user or (user == 0 and status.st_uid == UNPRIVILEGED)


def _undo(folder_fd: int, journal_fd: int, *, follow: bool) -> None:
    """Removes the files of a journal whose run was killed before they had all appeared."""
    try:
        journal = Journal.from_json(os.pread(journal_fd, _MAX_JOURNAL_BYTES, 0))
    except InputError:
        # It was never complete, so nothing was linked yet.
        return
    if journal.primary is not None and not Path(journal.primary).exists():
        return
    for folder in journal.folders if follow else ():
        other_fd = os.open(folder, _OPEN_FOLDER)
        try:
            _sweep(other_fd, follow=False)
        finally:
            os.close(other_fd)
    for entry in journal.files:
        with contextlib.suppress(FileNotFoundError):
            if entry.matches(os.stat(entry.name, dir_fd=folder_fd, follow_symlinks=False)):
                os.unlink(entry.name, dir_fd=folder_fd)


def current_umask() -> int:
    """Returns the umask, which os.umask can't read without setting it for every thread."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"^Umask:\s*([0-7]+)$", status, re.MULTILINE)
    return int(found[1], 8) if found else 0o077


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_named(folder_fd: int, name: str, fd: int) -> bool:
    try:
        named = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))

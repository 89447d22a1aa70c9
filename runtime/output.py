"""Put finished files in their places: whole and together or not at all, never over others."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator, Iterable
from pathlib import Path

from sam3d_gguf.extractors.publication import PublicationSet
from sam3d_gguf.extractors.target_folder import TargetFolder, output_error
from sam3d_gguf.schemas.errors import OutputError

NewFile = tuple[Path, Iterable[bytes]]


def publish(files: Iterable[NewFile]) -> None:
    """Write new files, each given as its parts, and make them appear together.

    Raises:
        OutputError: one exists or is named twice, or a folder is missing or cannot be written.
    """
    with PublicationSet() as publications:
        for path, parts in files:
            publication = publications.create(path)
            for part in parts:
                publication.write(part)
            publication.seal()
        publications.commit()


def publish_into(folder: Path, files: Iterable[NewFile]) -> None:
    """`publish`, making a missing folder first, and those in it that files lie in; they are
    removed again where that fails.

    Raises:
        OutputError: as `publish`, or a folder cannot be made.
    """
    listed = list(files)
    inner = {path.parent for path, _ in listed if folder in path.parents}
    with contextlib.ExitStack() as stack:
        for each in (folder, *sorted(inner - {folder})):
            stack.enter_context(_made(each))
        publish(listed)


def check_free(paths: Iterable[Path], *, makes_folders: bool = False) -> None:
    """Refuse outputs that could not be written, before what goes into them is computed.

    Args:
        makes_folders: whether missing folders will be made.

    Raises:
        OutputError: one exists or is named twice, or its folder is missing or cannot be written.
    """
    seen: set[Path] = set()
    for path in paths:
        if path.name in ("", ".."):
            raise OutputError("this is not a file's path", where=str(path))
        folder = path.parent
        try:
            if makes_folders:
                while not os.path.lexists(folder):
                    _check_name(folder)
                    folder = folder.parent
            place = folder.resolve() / path.relative_to(folder)
        except OSError as error:
            raise output_error(error, folder) from error
        if place in seen:
            raise OutputError("two outputs have the same path", where=str(path))
        seen.add(place)
        _check_place(folder, path)


def check_taps_free(taps: Path, places: Iterable[Path]) -> None:
    """`check_free` for one more file, which may lie beside outputs whose folder will be made.

    Args:
        places: the other outputs.

    Raises:
        OutputError: as `check_free`, or it is one of them.
    """
    others = [place.parent.resolve() / place.name for place in places]
    place = taps.parent.resolve() / taps.name
    if any(place == other or place in other.parents for other in others):
        raise OutputError("two outputs have the same path", where=str(taps))
    beside = taps.parent.resolve() in {other.parent for other in others}
    check_free([taps], makes_folders=beside)


def _check_place(folder: Path, path: Path) -> None:
    opened = TargetFolder(folder)
    try:
        if folder == path.parent:
            opened.check_absent(path)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise output_error(OSError(errno.EACCES, ""), folder)
    finally:
        opened.close()


def _check_name(folder: Path) -> None:
    # A name that is too long looks like one that doesn't exist.
    with contextlib.suppress(FileNotFoundError):
        folder.lstat()


@contextlib.contextmanager
def _made(folder: Path) -> Generator[None]:
    missing: list[Path] = []
    each = folder
    while not os.path.lexists(each):
        missing.append(each)
        each = each.parent
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise output_error(error, folder) from error
        yield
    except BaseException:
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()
        raise

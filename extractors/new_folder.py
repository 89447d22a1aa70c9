"""A folder that appears with all that is in it, in one step, or not at all.

    with new_folder(Path("native")) as folder:
        (folder.unfinished / "part.gguf").write_bytes(data)
        folder.appear()

It is made under an unfinished name beside its destination, so that a killed run leaves what the
next one there removes (see `litter`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from sam3d_gguf.extractors.litter import current_umask, scratch_folder
from sam3d_gguf.extractors.target_folder import TargetFolder, output_error
from sam3d_gguf.schemas.errors import OutputError


@dataclass(frozen=True, slots=True)
class NewFolder:
    """A folder that will appear at `path`; until then it is `unfinished`."""

    path: Path
    unfinished: Path
    _parent: TargetFolder

    def appear(self) -> None:
        """Gives the folder its name.

        Raises:
            OutputError: something else has it, or it can't be given.
        """
        self._parent.check_absent(self.path)
        try:
            self.unfinished.chmod(0o777 & ~current_umask())
            # A folder takes no other's name but that of an empty one.
            self.unfinished.rename(self._parent.path / self.path.name)
            os.fsync(self._parent.fd)
        except OSError as error:
            raise output_error(error, self.path) from error


@contextlib.contextmanager
def new_folder(path: Path) -> Generator[NewFolder]:
    """Starts a folder; it is gone at the end of the `with` block unless it has appeared.

    Raises:
        OutputError: something has its name already, or it can't be made there.
    """
    if path.name in ("", ".."):
        raise OutputError("this is not a new folder's path", where=str(path))
    parent = TargetFolder(path.parent)
    try:
        parent.check_absent(path)
        with contextlib.ExitStack() as stack:
            try:
                unfinished = stack.enter_context(scratch_folder(parent.path, path.name))
            except OSError as error:
                raise output_error(error, path) from error
            try:
                yield NewFolder(path, unfinished, parent)
            except OutputError as error:
                raise _named(error, unfinished, path) from error
    finally:
        parent.close()


def _named(error: OutputError, unfinished: Path, path: Path) -> OutputError:
    """The error in terms of the path that the caller knows."""
    where = error.where.replace(str(unfinished), str(path))
    return OutputError(error.what, where=where, expected=error.expected, action=error.action)

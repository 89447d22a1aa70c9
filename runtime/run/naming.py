"""Names of many photos: each its own, and named in errors."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from pathlib import Path

from sam3d_gguf.schemas.errors import InputError, Sam3dError


@contextlib.contextmanager
def naming(name: str) -> Generator[None]:
    """Put a photo's name before what its errors concern; nothing for the only one."""
    try:
        yield
    except Sam3dError as error:
        if not name:
            raise
        where = f"photo {name!r}" + (f", {error.where}" if error.where else "")
        raise type(error)(
            error.what, where=where, expected=error.expected, action=error.action
        ) from error


def refuse_same_names(names: Iterable[str], path: Path) -> None:
    """Refuse a document of photos of which two have one name.

    Raises:
        InputError: at the second's JSON pointer.
    """
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise InputError(f"second photo named {name!r}", where=f"{path}#/images/{index}/name")
        seen.add(name)

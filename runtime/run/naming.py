"""Names of many photos: each its own, and named in errors."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from sam3d_gguf.schemas.errors import InputError, within


def naming(name: str) -> AbstractContextManager[None]:
    """Put a photo's name before what its errors concern; nothing for the only one."""
    return within(f"photo {name!r}" if name else "")


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

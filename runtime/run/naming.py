"""Errors about one of many photos name it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from sam3d_gguf.schemas.errors import Sam3dError


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

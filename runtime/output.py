"""Put a finished file in its place: whole or not at all, and never over another file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from sam3d_gguf.schemas.errors import OutputError


def publish(path: Path, parts: Iterable[bytes]) -> None:
    """Write `parts` to a new file through a temporary name in the same folder.

    Raises:
        OutputError: `path` exists, or the folder cannot be written.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.part"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=str(path)) from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            for part in parts:
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(temporary, path)
    except FileExistsError as error:
        raise OutputError(
            "exists already",
            where=str(path),
            action="Choose another name; nothing is overwritten.",
        ) from error
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)

"""Lend a folder to the unprivileged user that runs the worker, and take it back."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

UNPRIVILEGED = 65534
"""User and group that run the worker: `nobody`, which owns nothing."""


@contextmanager
def handed_over(folder: Path) -> Generator[None]:
    """Give `folder` to the worker's user while root runs one; for other callers, nothing changes.

    What the worker left in it belongs to the caller afterwards.
    """
    if os.geteuid() != 0:
        yield
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        owner = os.fstat(handle)
        os.fchown(handle, UNPRIVILEGED, UNPRIVILEGED)
        try:
            yield
        finally:
            os.fchown(handle, owner.st_uid, owner.st_gid)
            with os.scandir(handle) as entries:
                for entry in entries:
                    _take(entry.name, owner, handle)
    finally:
        os.close(handle)


def _take(name: str, owner: os.stat_result, folder: int) -> None:
    os.chown(name, owner.st_uid, owner.st_gid, dir_fd=folder, follow_symlinks=False)

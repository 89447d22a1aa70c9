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
    """Give `folder` and its files to the worker's user while root runs one, and take them back.

    For other callers, nothing changes.
    """
    if os.geteuid() != 0:
        yield
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        owner = os.fstat(handle)
        _give(handle, UNPRIVILEGED, UNPRIVILEGED)
        try:
            yield
        finally:
            _give(handle, owner.st_uid, owner.st_gid)
    finally:
        os.close(handle)


def _give(folder: int, user: int, group: int) -> None:
    os.fchown(folder, user, group)
    with os.scandir(folder) as entries:
        for entry in entries:
            os.chown(entry.name, user, group, dir_fd=folder, follow_symlinks=False)

"""The removal of scratch folders, whatever was made in them."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path

import pytest

from sam3d_gguf.extractors.litter import scratch_folder

DEPTH = 3_000
ORDINARY_USER = 12345


def nest(folder: Path) -> None:
    """Make folders in folders, far deeper than a path or a recursion goes, some closed to all."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    closed: list[int] = []
    for depth in range(DEPTH):
        for name in ("f", "g"):
            os.mkdir(name, dir_fd=fd)
            os.close(os.open(f"{name}-file", os.O_CREAT | os.O_WRONLY, 0o400, dir_fd=fd))
        os.symlink("/etc/passwd", "link", dir_fd=fd)
        inner = os.open("f", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        if depth % 100 == 50:
            closed.append(os.dup(fd))
        os.close(fd)
        fd = inner
    os.close(fd)
    for fd in reversed(closed):
        os.chmod("f", 0, dir_fd=fd)
        os.chmod("g", 0, dir_fd=fd)
        os.close(fd)


def removes_what_nests(parent: Path) -> bool:
    """Whether nothing is left, with few descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
    try:
        with scratch_folder(parent) as folder:
            nest(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return list(parent.iterdir()) == []


def test_folders_nested_deeply_are_removed(tmp_path: Path) -> None:
    assert removes_what_nests(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_closed_folders_are_removed_by_an_ordinary_user() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, ORDINARY_USER, ORDINARY_USER)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setgroups([])
                os.setresgid(*[ORDINARY_USER] * 3)
                os.setresuid(*[ORDINARY_USER] * 3)
                code = 0 if removes_what_nests(Path(name)) else 1
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0

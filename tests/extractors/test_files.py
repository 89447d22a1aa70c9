"""Opening inputs: only regular files, no link, and a change is noticed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.schemas.errors import InputError


def test_a_regular_file_is_read_through_its_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(b"weights")

    with open_source(path) as file:
        path.unlink()
        assert file.size == 7
        assert file.source.pread(2, 5) == b"ights"
        assert not os.get_inheritable(file.fd)


def test_links_in_the_folders_of_the_path_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "model.ckpt").write_bytes(b"weights")
    (tmp_path / "link").symlink_to("real")

    with open_source(tmp_path / "link" / "model.ckpt") as file:
        assert file.size == 7


def make_link(path: Path) -> None:
    path.with_suffix(".target").write_bytes(b"weights")
    path.symlink_to(path.with_suffix(".target"))


def make_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def make_endless_link(path: Path) -> None:
    path.symlink_to(path)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        # A socket's address is too short for some temporary folders' paths.
        descriptor = os.open(path.parent, os.O_PATH)
        listener.bind(f"/proc/self/fd/{descriptor}/{path.name}")
        os.close(descriptor)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (make_link, "a symbolic link"),
        (make_dangling_link, "a symbolic link"),
        (make_endless_link, "a symbolic link"),
        (make_folder, "a folder"),
        (make_pipe, "a named pipe"),
        (make_socket, "a socket"),
    ],
)
def test_anything_else_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], None], kind: str
) -> None:
    path = tmp_path / "model.ckpt"
    make(path)

    with pytest.raises(InputError, match=f"this is {kind}; expected a regular file"):
        open_source(path)


def test_a_device_is_refused() -> None:
    with pytest.raises(InputError, match="this is a character device"):
        open_source("/dev/zero")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing", "No such file"),
        ("file/model.ckpt", "Not a directory"),
        ("nul\0", "not a path"),
        ("x" * 300, "too long"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(InputError, match=problem):
        open_source(tmp_path / name)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_refusals_leave_no_descriptor_open(tmp_path: Path) -> None:
    before = open_descriptors()
    for _ in range(3):
        with pytest.raises(InputError):
            open_source(tmp_path)

    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("content", "how"),
    [
        (b"Weights", "its time differs"),
        (b"weights, more of them", "it had 7 bytes, now it has 21"),
        (b"", "it had 7 bytes, now it has 0"),
    ],
)
def test_a_source_that_changes_while_it_is_read_is_noticed(
    tmp_path: Path, content: bytes, how: str
) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(b"weights")
    # Away from now, since the clock of modification times may stand still for some milliseconds.
    os.utime(path, ns=(0, 10**18))

    with open_source(path) as file:
        file.assert_unchanged()
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"changed while it was read: {how}"):
            file.assert_unchanged()


def test_a_file_put_in_the_place_of_the_source_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(b"weights")

    with open_source(path) as file:
        path.with_suffix(".new").write_bytes(b"other")
        path.with_suffix(".new").replace(path)
        file.assert_unchanged()
        assert file.source.pread(0, 7) == b"weights"

"""A folder appears with all that is in it, or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_release import names_in

from sam3d_gguf.extractors.litter import scratch_folder
from sam3d_gguf.extractors.new_folder import new_folder
from sam3d_gguf.extractors.publication import PublicationSet
from sam3d_gguf.extractors.sandbox.handover import UNPRIVILEGED
from sam3d_gguf.schemas.errors import OutputError


def test_it_appears_with_its_files(tmp_path: Path) -> None:
    path = tmp_path / "out"
    before = os.umask(0o027)
    try:
        with new_folder(path) as folder, PublicationSet() as publications:
            file = publications.create(folder.unfinished / "model.gguf")
            file.write(b"model")
            file.seal()
            publications.commit()
            assert not path.exists()
            folder.appear()
    finally:
        os.umask(before)

    assert names_in(tmp_path) == ["out"]
    assert (path / "model.gguf").read_bytes() == b"model"
    assert path.stat().st_mode & 0o777 == 0o750


def test_it_is_gone_unless_it_appears(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as folder:
        (folder.unfinished / "model.gguf").write_bytes(b"model")

    assert names_in(tmp_path) == []


def test_an_error_leaves_nothing_and_names_the_path_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "out"

    with pytest.raises(OutputError) as caught, new_folder(path) as folder:
        raise OutputError("the disk is full", where=str(folder.unfinished / "model.gguf"))

    assert caught.value.where == str(path / "model.gguf")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("kind", ["folder", "file", "link", "dangling link"])
def test_a_taken_name_is_refused_before_and_after(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()

    def take() -> None:
        if kind == "folder":
            path.mkdir()
        elif kind == "file":
            path.write_bytes(b"")
        else:
            path.symlink_to(other if kind == "link" else tmp_path / "nowhere")

    take()
    with pytest.raises(OutputError, match="exists already"), new_folder(path):
        pass
    path.rmdir() if kind == "folder" else path.unlink()
    with pytest.raises(OutputError, match="exists already"), new_folder(path) as folder:
        take()
        folder.appear()

    assert names_in(tmp_path) == ["other", "out"]
    assert names_in(other) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="doesn't exist"), new_folder(tmp_path / "no" / "out"):
        pass
    with pytest.raises(OutputError, match="new folder's path"), new_folder(Path("..")):
        pass


def test_a_killed_run_leaves_the_name_free_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path;"
        "from sam3d_gguf.extractors.new_folder import new_folder;"
        "context = new_folder(Path(sys.argv[1])); folder = context.__enter__();"
        "(folder.unfinished / 'model.gguf').write_bytes(b'model'); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", program, tmp_path / "out"], check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = names_in(tmp_path)
    assert left != "out"

    with new_folder(tmp_path / "out") as folder:
        folder.appear()

    assert names_in(tmp_path) == ["out"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root lends its folders to another user")
def test_a_folder_lent_to_the_sandbox_is_cleaned_up_too(tmp_path: Path) -> None:
    left = tmp_path / ".scratch.sam3d-1-0123456789abcdef.part"
    left.mkdir()
    (left / "report.json").write_bytes(b"{}")
    os.chown(left / "report.json", UNPRIVILEGED, UNPRIVILEGED)
    os.chown(left, UNPRIVILEGED, UNPRIVILEGED)

    with scratch_folder(tmp_path):
        pass

    assert names_in(tmp_path) == []

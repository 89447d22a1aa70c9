"""Outputs appear together in a folder that is made for them, or neither they nor it do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sam3d_gguf.runtime.output import check_free, publish_into
from sam3d_gguf.schemas.errors import OutputError


def breaking(error: BaseException) -> Iterator[bytes]:
    yield b"begun"
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(28, "full")])
def test_what_fails_leaves_no_folder(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "mine").mkdir()
    folder = tmp_path / "mine" / "new" / "folder"
    with pytest.raises(type(error)):
        publish_into(folder, [(folder / "a", [b"whole"]), (folder / "b", breaking(error))])
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    publish_into(folder, [(folder / "a", [b"who", b"le"])])
    with pytest.raises(type(error)):
        publish_into(folder, [(folder / "b", breaking(error))])
    assert (folder / "a").read_bytes() == b"whole"
    assert list(folder.iterdir()) == [folder / "a"]


def test_folders_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "x", Path("/proc/none/x")):
        with pytest.raises(OutputError):
            publish_into(folder, [(folder / "a", [b""])])


def test_names_are_checked_beforehand(tmp_path: Path) -> None:
    (tmp_path / "there").symlink_to("nowhere")
    check_free([tmp_path / "a", tmp_path / "b"])
    check_free([tmp_path / "new" / "a"], makes_folders=True)
    for paths, words in (
        ([tmp_path / "there"], "exists already: it is a symbolic link"),
        ([tmp_path / "a", tmp_path / "." / "a"], "two outputs"),
        ([tmp_path / "new" / "a"], "the folder doesn't exist"),
        ([tmp_path / ".."], "not a file's path"),
    ):
        with pytest.raises(OutputError, match=words):
            check_free(paths)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]

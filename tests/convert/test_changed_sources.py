"""Sources that are changed while they are read: found, whenever it happens."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_release import (
    CHECKPOINT,
    CONFIG,
    Release,
    flip,
    from_extraction,
    names_in,
    read_json,
    request,
)

from sam3d_gguf.convert import products as products_module
from sam3d_gguf.convert import release as release_module
from sam3d_gguf.convert import verify_file as verify_file_module
from sam3d_gguf.convert.release import convert_body, extract_to_folder
from sam3d_gguf.convert.verify import verify
from sam3d_gguf.extractors import extract as extract_module
from sam3d_gguf.schemas.errors import InputError, Sam3dError

Change = Callable[[Path], None]


def append(path: Path) -> None:
    """Make the file longer."""
    with path.open("ab") as file:
        file.write(b"\0")


def cut(path: Path) -> None:
    """Make the file shorter."""
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    """Take everything away."""
    os.truncate(path, 0)


def touch(path: Path) -> None:
    """Only its time says that it was written to."""
    os.utime(path, ns=(1, 1))


def secretly(change: Change) -> Change:
    """A change that puts the time back."""

    def changed(path: Path) -> None:
        status = path.stat()
        change(path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return changed


def flip_at(offset: int) -> Change:
    """Change one byte."""
    return lambda path: flip(path, offset % path.stat().st_size)


def place_of_a_tensor(single: Release) -> int:
    """The offset of a byte of `init_pose.weight` in the checkpoint."""
    data = CHECKPOINT.read_bytes()
    report = read_json(single.extraction / "extraction.json")
    (row,) = [row for row in report["tensors"] if row["name"] == "init_pose.weight"]
    tensor = data.find(f"{report['archive']['root']}/{row['member']}".encode())
    return tensor + 100


CHANGES: dict[str, Change] = {
    "append": append,
    "cut": cut,
    "empty": empty,
    "touch": touch,
    "first byte": flip_at(10),
    "directory, secretly": secretly(flip_at(-30)),
    "first byte, secretly": secretly(flip_at(10)),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of the test's own."""
    path = tmp_path / "source" / "model.ckpt"
    path.parent.mkdir()
    shutil.copy(CHECKPOINT, path)
    return path


def after(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, change: Callable[[], object]
) -> None:
    """Change something right after a function's first call."""
    original, done = getattr(module, name), threading.Event()

    def call(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if not done.is_set():
            done.set()
            change()
        return result

    monkeypatch.setattr(module, name, call)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_the_sandbox_reads_is_found(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    after(monkeypatch, extract_module, "run_worker", lambda: CHANGES[change](source))

    with pytest.raises(InputError):
        extract_to_folder("body", source, tmp_path / "out", allow_unpinned=True)

    assert names_in(tmp_path) == ["source"]


@pytest.mark.parametrize("function", ["run_worker", "recheck"])
def test_a_tensor_changed_secretly_is_found(
    single: Release,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
) -> None:
    change = secretly(flip_at(place_of_a_tensor(single)))
    after(monkeypatch, extract_module, function, lambda: change(source))

    with pytest.raises(InputError) as caught:
        extract_to_folder("body", source, tmp_path / "out", allow_unpinned=True)

    assert "init_pose.weight" in str(caught.value) or "was changed" in str(caught.value)
    assert names_in(tmp_path) == ["source"]


def test_a_file_put_in_place_of_the_source_is_not_read(
    single: Release, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor stays: what was opened is what is converted."""

    def replace() -> None:
        other = source.with_name("other")
        other.write_bytes(b"something else")
        other.rename(source)

    after(monkeypatch, extract_module, "hash_file", replace)

    extraction = extract_to_folder("body", source, tmp_path / "out", allow_unpinned=True)

    stated = read_json(single.extraction / "extraction.json")["source"]
    assert extraction.source.sha256 == stated["sha256"]


@pytest.mark.parametrize("file", ["backbone.safetensors", "other.safetensors"])
def test_safetensors_changed_after_their_check_are_found(
    single: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    folder, out = tmp_path / "extraction", tmp_path / "out"
    shutil.copytree(single.extraction, folder)
    out.mkdir()
    change = secretly(flip_at(-1))
    after(monkeypatch, products_module, "_require_stated_files", lambda: change(folder / file))

    with pytest.raises(Sam3dError, match=r"was changed|is not finite"):
        convert_body(from_extraction(folder, out / "body.gguf", mhr=None))

    assert names_in(out) == []


def test_a_configuration_is_hashed_as_it_was_parsed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written to its path afterwards is neither read nor recorded."""
    config, out = tmp_path / "source" / "model_config.yaml", tmp_path / "out"
    shutil.copy(CONFIG, config)
    out.mkdir()
    after(monkeypatch, release_module, "read_config", lambda: config.write_text("{}"))

    manifest = convert_body(request(out / "body.gguf", checkpoint=source, config=config, mhr=None))

    assert manifest.sources[1].identity.bytes == CONFIG.stat().st_size


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_changed_while_it_is_verified_is_found(
    single: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    copy = single.copy(tmp_path)
    after(monkeypatch, verify_file_module, "cross_read", lambda: CHANGES[change](copy.mhr))

    result = verify([copy.mhr])

    assert not result.is_good

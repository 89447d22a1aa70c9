"""Publishing: whole, verified, together, or not at all, whatever happens and whenever."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sam3d_gguf.extractors import target_folder
from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.extractors.litter import create_locked, scratch_folder, unfinished_name
from sam3d_gguf.extractors.publication import (
    ExpectedRegion,
    Publication,
    PublicationSet,
    SealedFile,
    settle,
)
from sam3d_gguf.schemas.errors import InputError, OutputError

CONTENTS = {"body.gguf": b"body" * 500, "mhr.gguf": b"mhr" * 700, "manifest.json": b"{}\n"}


@pytest.fixture(params=["nameless", "named"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with files without a name, and as on a file system that has none."""
    if request.param == "named":
        monkeypatch.setattr(target_folder, "open_nameless", no_nameless)
    return str(request.param)


def no_nameless(folder_fd: int) -> None:
    return None


def publish(folder: Path, manifest_folder: Path | None = None) -> tuple[SealedFile, ...]:
    with PublicationSet() as publications:
        for name, content in CONTENTS.items():
            parent = manifest_folder if manifest_folder and name == "manifest.json" else folder
            file = publications.create(parent / name, len(content))
            file.write(content[:3])
            file.write(content[3:])
            file.seal()
        return publications.commit()


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_files_appear_whole_with_their_digests(tmp_path: Path) -> None:
    sealed = publish(tmp_path)

    assert content_of(tmp_path) == CONTENTS
    assert sealed == tuple(
        SealedFile(tmp_path / name, len(data), digest(data)) for name, data in CONTENTS.items()
    )


def test_the_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        publish(tmp_path)
    finally:
        os.umask(before)

    assert {path.stat().st_mode & 0o7777 for path in tmp_path.iterdir()} == {0o640}


def test_nothing_appears_before_the_commit(tmp_path: Path, way: str) -> None:
    with PublicationSet() as publications:
        file = publications.create(tmp_path / "body.gguf")
        file.write(b"body")
        file.seal()
        names = [path.name for path in tmp_path.iterdir()]
        assert "body.gguf" not in names
        assert names == [] if way == "nameless" else len(names) == 1

    assert list(tmp_path.iterdir()) == []


def test_the_manifest_may_lie_elsewhere(tmp_path: Path) -> None:
    models, manifests = tmp_path / "models", tmp_path / "manifests"
    models.mkdir()
    manifests.mkdir()

    publish(models, manifests)

    assert content_of(models) == {n: d for n, d in CONTENTS.items() if n != "manifest.json"}
    assert content_of(manifests) == {"manifest.json": CONTENTS["manifest.json"]}


def test_files_whose_names_are_not_utf8_appear_together(tmp_path: Path) -> None:
    names = ["\udcff.json", "\udcff.html", "é.json"]
    with PublicationSet() as publications:
        for name in names:
            publications.create(tmp_path / name).seal()
        publications.commit()

    assert {path.name for path in tmp_path.iterdir()} == set(names)


def test_the_order_of_creation_is_the_order_of_appearance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def link(self: Publication) -> None:
        order.append(self.destination.name)

    monkeypatch.setattr(Publication, "link", link)
    publish(tmp_path)

    assert order == list(CONTENTS)


def test_regions_written_in_any_order_are_verified(tmp_path: Path) -> None:
    with PublicationSet() as publications:
        file = publications.create(tmp_path / "body.gguf", 12)
        file.resize(12)
        file.write_at(8, memoryview(b"tail"))
        file.write_at(0, b"head")
        parts = [(0, b"head"), (4, bytes(4)), (8, b"tail")]
        sealed = file.seal([ExpectedRegion(at, len(data), digest(data)) for at, data in parts])
        publications.commit()

    assert (tmp_path / "body.gguf").read_bytes() == b"head\0\0\0\0tail"
    assert sealed.sha256 == digest(b"head\0\0\0\0tail")


def test_a_region_that_reads_back_differently_is_refused(tmp_path: Path) -> None:
    with PublicationSet() as publications:
        file = publications.create(tmp_path / "body.gguf")
        file.write(b"head")
        os.pwrite(file.fd, b"x", 2)
        with pytest.raises(OutputError, match="4 bytes at 0 read back differently"):
            file.seal()
        with pytest.raises(ValueError, match="not sealed"):
            publications.commit()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("written", [b"head", b"header"])
def test_another_size_than_announced_is_refused(tmp_path: Path, written: bytes) -> None:
    with PublicationSet() as publications:
        file = publications.create(tmp_path / "body.gguf", 5)
        file.write(written)
        with pytest.raises(OutputError, match=f"has {len(written)} bytes; expected 5"):
            file.seal()


@pytest.mark.parametrize("regions", [[(0, 3)], [(1, 3)], [(0, 2), (1, 3)], [(0, 2), (3, 1)], []])
def test_regions_must_cover_the_file(tmp_path: Path, regions: list[tuple[int, int]]) -> None:
    with PublicationSet() as publications:
        file = publications.create(tmp_path / "body.gguf")
        file.write(b"head")
        with pytest.raises((ValueError, OutputError)):
            file.seal([ExpectedRegion(at, n, digest(b"head"[at : at + n])) for at, n in regions])


def occupy_with_file(path: Path) -> None:
    path.write_bytes(b"precious")


def occupy_with_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def occupy_with_folder(path: Path) -> None:
    path.mkdir()


OCCUPANTS = [
    (occupy_with_file, "a file"),
    (occupy_with_dangling_link, "a symbolic link"),
    (occupy_with_folder, "a folder"),
]


@pytest.mark.parametrize(("occupy", "kind"), OCCUPANTS)
def test_a_destination_that_exists_is_refused_before_any_work(
    tmp_path: Path, occupy: Callable[[Path], None], kind: str
) -> None:
    occupy(tmp_path / "body.gguf")

    with PublicationSet() as publications, pytest.raises(OutputError, match=f"it is {kind}"):
        publications.create(tmp_path / "body.gguf")


@pytest.mark.parametrize("name", list(CONTENTS))
@pytest.mark.parametrize(("occupy", "kind"), OCCUPANTS)
def test_a_destination_taken_meanwhile_is_never_replaced_and_nothing_else_appears(
    tmp_path: Path, occupy: Callable[[Path], None], kind: str, name: str
) -> None:
    with PublicationSet() as publications:
        for other, content in CONTENTS.items():
            file = publications.create(tmp_path / other)
            file.write(content)
            file.seal()
        occupy(tmp_path / name)
        before = (tmp_path / name).lstat()
        with pytest.raises(OutputError, match="exists already"):
            publications.commit()

    assert [path.name for path in tmp_path.iterdir()] == [name]
    after = (tmp_path / name).lstat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)


def test_a_folder_that_cannot_be_forced_to_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def fail(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").is_dir() and (tmp_path / "manifest.json").exists():
            raise OSError(errno.EIO, "broken")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match="can't be written: broken"):
        publish(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_two_outputs_with_one_path_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with PublicationSet() as publications:
        publications.create(tmp_path / "body.gguf")
        with pytest.raises(OutputError, match="two outputs have the same path"):
            publications.create(tmp_path / "link" / "body.gguf")


@pytest.mark.parametrize(
    ("destination", "problem"),
    [
        ("missing/body.gguf", "folder doesn't exist.*Create it"),
        ("file/body.gguf", "isn't a folder"),
        ("x" * 256, "name is too long"),
        ("..", "not a file's path"),
        ("nul\0/body.gguf", "not a path"),
    ],
)
def test_a_destination_that_cannot_be_is_refused(
    tmp_path: Path, destination: str, problem: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with PublicationSet() as publications, pytest.raises(OutputError, match=problem):
        publications.create(tmp_path / destination)


def test_a_name_as_long_as_names_get_is_published(tmp_path: Path) -> None:
    name = "é" * 127
    with PublicationSet() as publications:
        publications.create(tmp_path / name).seal()
        publications.commit()

    assert content_of(tmp_path) == {name: b""}


def test_the_space_of_all_files_together_is_checked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = os.statvfs(tmp_path).f_frsize

    class Space:
        f_bavail, f_frsize, f_files, f_favail = 10, block, 0, 0

    def ten_blocks_free(fd: int) -> type[Space]:
        return Space

    monkeypatch.setattr(os, "fstatvfs", ten_blocks_free)
    with PublicationSet() as publications:
        first = publications.create(tmp_path / "body.gguf", 6 * block)
        with pytest.raises(OutputError, match=f"{10 * block} bytes free.*at least {11 * block}"):
            publications.create(tmp_path / "mhr.gguf", 5 * block)
        first.write(bytes(6 * block))
        publications.create(tmp_path / "mhr.gguf", 10 * block)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (errno.ENOSPC, r"disk is full \(10 of 10 bytes are still missing\).*Free space"),
        (errno.EDQUOT, "quota is used up"),
        (errno.EROFS, "file system is read-only"),
        (errno.EFBIG, "a file this large"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_failing_write_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, problem: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with PublicationSet() as publications:
        file = publications.create(tmp_path / "body.gguf", 10)
        with monkeypatch.context() as patch, pytest.raises(OutputError, match=problem):
            patch.setattr(os, "pwrite", fail)
            file.write(b"0123456789")

    assert list(tmp_path.iterdir()) == []


def test_a_write_that_is_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def three_bytes(fd: int, data: memoryview, offset: int) -> int:
        return pwrite(fd, data[:3], offset)

    monkeypatch.setattr(os, "pwrite", three_bytes)
    with PublicationSet() as publications:
        file = publications.create(tmp_path / "body.gguf")
        file.write(b"0123456789")
        assert file.seal().sha256 == digest(b"0123456789")


def test_a_file_system_without_hard_links_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "nameless":
        pytest.skip("a file system with nameless files has hard links")

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", fail)
    with PublicationSet() as publications, pytest.raises(OutputError, match="no hard links"):
        publications.create(tmp_path / "body.gguf")

    assert list(tmp_path.iterdir()) == []


# A second file system, small or read-only, in a mount namespace of its own.

SMALL_DISK = Path(__file__).with_name("small_disk.py")


def in_namespace(scenario: str, way: str) -> dict[str, Any]:
    unshare = shutil.which("unshare")
    namespaces = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
    if unshare is None or subprocess.run([unshare, *namespaces, "true"], check=False).returncode:
        pytest.skip("this machine allows no mount namespace")
    command = [unshare, *namespaces, sys.executable, str(SMALL_DISK), scenario, way]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(result.stdout))


def test_a_disk_too_small_is_noticed_before_any_work(way: str) -> None:
    result = in_namespace("announced", way)

    assert "bytes free; expected at least 4194304" in result["error"]
    assert result["left"] == []


def test_a_disk_that_fills_while_writing_leaves_nothing(way: str) -> None:
    result = in_namespace("fills", way)

    assert "the disk is full" in result["error"]
    assert "1048576 bytes are still missing" in result["error"]
    assert result["left"] == ["filler"]


def test_a_disk_that_is_full_at_the_commit_leaves_nothing(way: str) -> None:
    result = in_namespace("full-at-commit", way)

    assert "the disk is full" in result["error"]
    assert result["left"] == ["filler"]


def test_a_read_only_folder_is_refused(way: str) -> None:
    result = in_namespace("read-only", way)

    assert "the file system is read-only" in result["error"]
    assert result["left"] == []


# Killed runs. `os` functions that change a file system are counted, and the child kills itself
# before the n-th: every state that a kill can leave is met.

STEPS = ("open", "link", "unlink", "fsync", "pwrite", "ftruncate", "posix_fadvise")


def in_child(action: Callable[[], object]) -> int:
    """Runs action in a forked child; returns how it ended: 0, or minus the signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_before_step(count: int, action: Callable[[], object]) -> int:
    def run() -> None:
        remaining = [count]
        lock = threading.Lock()

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def step(*args: Any, **kwargs: Any) -> Any:
                with lock:
                    remaining[0] -= 1
                    if remaining[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return step

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        action()

    return in_child(run)


def everything(root: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("folders", ["one folder", "two folders", "two folders \udcff"])
def test_a_kill_at_any_step_leaves_all_or_nothing_after_the_next_run(
    tmp_path: Path, folders: str
) -> None:
    outcomes: list[bool] = []
    for count in range(1000):
        root = tmp_path / f"{folders} {count}"
        models = root / "models"
        manifests = models if folders == "one folder" else root / "manifests"
        models.mkdir(parents=True)
        manifests.mkdir(exist_ok=True)

        status = killed_before_step(count, partial(publish, models, manifests))
        # The next run may use the folders in any order.
        for folder in (models, manifests) if count % 2 else (manifests, models):
            with PublicationSet() as publications:
                publications.create(folder / "other.gguf")

        found = everything(root)
        assert found in ({}, CONTENTS), f"killed before step {count}"
        outcomes.append(bool(found))
        if status == 0:
            break
        assert status == -signal.SIGKILL
    # Nothing, until one step makes it everything.
    assert outcomes == sorted(outcomes)
    assert not outcomes[0]
    assert outcomes[-1]


CHILD = """
import sys
from pathlib import Path
from sam3d_gguf.extractors import target_folder
from sam3d_gguf.extractors.publication import PublicationSet
if sys.argv[2] == "named":
    target_folder.open_nameless = lambda folder_fd: None
block = bytes(range(256)) * 256
for run in range(1000):
    with PublicationSet() as publications:
        for name in ("body.gguf", "mhr.gguf", "manifest.json"):
            file = publications.create(Path(sys.argv[1]) / f"{run}-{name}", 32 * len(block))
            for _ in range(32):
                print(run, name, flush=True)
                file.write(block)
            file.seal()
        publications.commit()
"""


def test_a_kill_at_a_random_moment_leaves_all_or_nothing_after_the_next_run(
    tmp_path: Path, way: str
) -> None:
    choose = random.Random(f"moments {way}")
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        command = [sys.executable, "-c", CHILD, str(folder), way]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(choose.randrange(1, 300)):
                child.stdout.readline()
            child.kill()

        with PublicationSet() as publications:
            publications.create(folder / "other.gguf")

        names = {path.name for path in folder.iterdir()}
        runs = {name.partition("-")[0] for name in names}
        parts = ("body.gguf", "mhr.gguf", "manifest.json")
        assert names == {f"{run}-{part}" for run in runs for part in parts}
        assert all(path.read_bytes() == bytes(range(256)) * 8192 for path in folder.iterdir())


# What killed runs left, and what only looks like it.


def other_run(folder: Path) -> None:
    """Publishes something else in the folder, which removes litter first."""
    with PublicationSet() as publications:
        publications.create(folder / "other.gguf")


def abandoned(folder: Path, content: bytes, kind: str, name: str = "body.gguf") -> Path:
    path = folder / unfinished_name(name, kind)
    path.write_bytes(content)
    return path


def journal(*files: Path, name: str | None = None) -> bytes:
    entries: list[dict[str, object]] = []
    for file in files:
        status = file.stat()
        identity = {"inode": status.st_ino, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
        entries.append({"name": file.name if name is None else name, **identity})
    return json.dumps({"files": entries, "primary": None, "folders": []}).encode()


def test_a_living_run_keeps_its_files(tmp_path: Path) -> None:
    with PublicationSet() as publications, scratch_folder(tmp_path) as scratch:
        publications.create(tmp_path / "body.gguf").write(b"body")
        folder_fd = os.open(tmp_path, os.O_RDONLY)
        fd, journal_name = create_locked(folder_fd, "body.gguf", "journal")
        before = set(tmp_path.iterdir())

        assert in_child(lambda: other_run(tmp_path)) == 0

        assert set(tmp_path.iterdir()) == before >= {tmp_path / journal_name, scratch}
        os.close(fd)
        os.close(folder_fd)


def test_the_litter_of_killed_runs_is_removed(tmp_path: Path) -> None:
    abandoned(tmp_path, b"half", "part")
    abandoned(tmp_path, b"", "journal")
    abandoned(tmp_path, b'{"files": [', "journal")
    scratch = tmp_path / unfinished_name("scratch", "part")
    (scratch / "deep").mkdir(parents=True)
    (scratch / "deep" / "file").write_bytes(b"half")

    other_run(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_what_is_not_litter_stays(tmp_path: Path) -> None:
    names = [
        "body.gguf",
        "body.gguf.sam3d-1-0123456789abcdef.part",
        ".body.gguf.sam3d-x-0123456789abcdef.part",
        ".body.gguf.sam3d-1-0123456789abcdef.part.txt",
        ".body.gguf.part",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"precious")
    target = tmp_path / "target"
    target.mkdir()
    link = tmp_path / unfinished_name("link", "part")
    link.symlink_to(target)
    fifo = tmp_path / unfinished_name("pipe", "part")
    os.mkfifo(fifo)

    other_run(tmp_path)

    assert {p.name for p in tmp_path.iterdir()} == {*names, "target", link.name, fifo.name}


def test_a_journal_removes_only_the_very_files_that_it_names(tmp_path: Path) -> None:
    victim = tmp_path / "body.gguf"
    victim.write_bytes(b"half of a release")
    kept = tmp_path / "mhr.gguf"
    kept.write_bytes(b"precious")
    text = journal(victim, kept)
    kept.with_suffix(".new").write_bytes(b"precious")
    kept.with_suffix(".new").replace(kept)
    abandoned(tmp_path, text, "journal")

    other_run(tmp_path)

    assert content_of(tmp_path) == {"mhr.gguf": b"precious"}


@pytest.mark.parametrize("name", ["../precious", "/", "..", ".", "", "folder/precious"])
def test_a_forged_journal_removes_nothing_outside_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    inside = folder / "precious"
    os.link(precious, inside)
    abandoned(folder, journal(precious, name=name), "journal")

    other_run(folder)

    assert precious.exists()
    assert content_of(folder) == {"precious": b"precious"}


def test_forged_journals_that_name_each_other_end(tmp_path: Path) -> None:
    text = json.dumps({"files": [], "primary": None, "folders": [str(tmp_path)]}).encode()
    for _ in range(5):
        abandoned(tmp_path, text, "journal")

    other_run(tmp_path)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_the_litter_of_another_user_stays(tmp_path: Path) -> None:
    path = abandoned(tmp_path, b"half", "part")
    os.chown(path, 12345, 12345)

    other_run(tmp_path)

    assert path.exists()


# Files made elsewhere, such as by a sandboxed worker.


def test_a_file_made_in_a_scratch_folder_is_adopted(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as scratch, PublicationSet() as publications:
        made = scratch / "other.safetensors"
        made.write_bytes(b"tensors")
        made.chmod(0o4755)
        if os.geteuid() == 0:
            os.chown(made, 12345, 12345)
        with open_source(made) as file:
            settle(file.fd)
            target = tmp_path / "kept.safetensors"
            sealed = publications.adopt(file, target, digest(b"tensors")).sealed
        publications.commit()

    assert content_of(tmp_path) == {"kept.safetensors": b"tensors"}
    assert sealed == SealedFile(target, 7, digest(b"tensors"))
    status = target.stat()
    assert (status.st_uid, status.st_gid) == (os.geteuid(), os.getegid())
    assert status.st_mode & 0o7133 == 0


def test_a_file_that_was_changed_is_not_adopted(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.write_bytes(b"tensors")
    with PublicationSet() as publications, open_source(made) as file:
        made.write_bytes(b"tensor")
        with pytest.raises(InputError, match="changed while it was read"):
            publications.adopt(file, tmp_path / "kept", digest(b"tensors"))


def test_a_file_of_another_file_system_is_not_adopted(tmp_path: Path) -> None:
    with (
        PublicationSet() as publications,
        open_source("/proc/self/status") as file,
        pytest.raises(OutputError, match="made on another file system"),
    ):
        publications.adopt(file, tmp_path / "kept", digest(b""))


def test_a_scratch_folder_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), scratch_folder(tmp_path) as scratch:
        assert scratch.stat().st_mode & 0o777 == 0o700
        (scratch / "file").write_bytes(b"half")
        raise RuntimeError

    assert list(tmp_path.iterdir()) == []


def test_a_scratch_folder_goes_with_folders_that_nobody_may_read(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    with scratch_folder(tmp_path) as scratch:
        (scratch / "deep" / "deeper").mkdir(parents=True)
        (scratch / "link").symlink_to(outside)
        for folder in (scratch / "deep" / "deeper", scratch / "deep", scratch):
            folder.chmod(0)
    assert list(tmp_path.iterdir()) == [outside]
    assert outside.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero"])
def test_nobody_is_told_to_remove_a_device(path: str) -> None:
    with PublicationSet() as publications, pytest.raises(OutputError, match="a device") as caught:
        publications.create(Path(path))
    assert "Remove" not in str(caught.value)


def test_a_folder_that_takes_no_files_is_not_called_missing() -> None:
    with PublicationSet() as publications, pytest.raises(OutputError, match="no file can be made"):
        publications.create(Path("/proc/model.gguf"))

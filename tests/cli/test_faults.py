"""Faults on the real commands: whatever happens, the outputs are there and right, or not at all."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_release import ASSET, CHECKPOINT, CONFIG, Release, names_in, sha256

from sam3d_gguf.convert.verify import verify

TESTS = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
SOURCES = ("--checkpoint", CHECKPOINT, "--config", CONFIG, "--mhr", ASSET, "--allow-unpinned")


@dataclass(frozen=True)
class Task:
    """A command, and what it makes in a folder."""

    arguments: tuple[str | Path, ...]
    outputs: frozenset[str]

    def command(self, folder: Path) -> list[str]:
        """The command line, with outputs in the folder."""
        return [str(a).replace("{}", str(folder)) for a in self.arguments]

    def installed(self, folder: Path) -> list[str]:
        """The same with the path of the installed command."""
        name, *arguments = self.command(folder)
        return [str(BIN / name), *arguments]


TASKS = {
    "single": Task(
        ("sam3d-convert", "body", *SOURCES, "--out", "{}/body.gguf"),
        frozenset({"body.gguf", "mhr.gguf", "manifest.json"}),
    ),
    "components": Task(
        ("sam3d-convert", "body", *SOURCES, "--layout", "components", "--out", "{}/native"),
        frozenset({"native"}),
    ),
    "kept": Task(
        (
            *("sam3d-convert", "mhr", "--checkpoint", ASSET, "--allow-unpinned"),
            *("--keep-safetensors", "{}", "--out", "{}/mhr.gguf"),
        ),
        frozenset({"mhr.gguf", "manifest.json", "mhr.safetensors", "extraction.json"}),
    ),
    "extract": Task(
        ("sam3d-extract", "body", "--checkpoint", CHECKPOINT, "--allow-unpinned", "--out", "{}/x"),
        frozenset({"x"}),
    ),
}


class Server:
    """Runs commands in forks of one process, see `command_server`."""

    def __init__(self) -> None:
        paths = (str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", ""))
        self.process = subprocess.Popen(
            [sys.executable, TESTS / "command_server.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )

    def run(
        self, command: Sequence[str], seconds: float | None = None, number: int = signal.SIGKILL
    ) -> dict[str, Any]:
        """Run a command, interrupted after some time."""
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {"arguments": command, "seconds": seconds, "signal": number}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    """A server of commands."""
    running = Server()
    yield running
    assert running.process.stdin is not None
    running.process.stdin.close()
    running.process.wait()


@pytest.fixture(scope="module")
def duration(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """How long each task takes on this machine, now."""
    seconds: dict[str, float] = {}
    for name, task in TASKS.items():
        answer = server.run(task.command(tmp_path_factory.mktemp(name)))
        assert answer["code"] == 0, answer["err"]
        seconds[name] = answer["seconds"]
    return seconds


def visible(folder: Path) -> set[str]:
    """The names in a folder that no unfinished run has."""
    return {name for name in names_in(folder) if ".sam3d-" not in name}


def check_complete(folder: Path, task: Task) -> None:
    """All outputs are there, and right."""
    assert visible(folder) == task.outputs
    for manifest in folder.rglob("manifest.json"):
        assert verify([manifest]).is_good
    for report in folder.rglob("extraction.json"):
        for product in json.loads(report.read_text())["products"]:
            assert sha256(report.parent / product["file"]) == product["sha256"]


def remove_outputs(folder: Path, task: Task) -> None:
    """Make way for another run, as a user would."""
    for name in task.outputs:
        path = folder / name
        for file in sorted(path.rglob("*"), reverse=True) if path.is_dir() else ():
            file.unlink()
        path.rmdir() if path.is_dir() else path.unlink()


def left_running(folder: Path) -> list[str]:
    """Processes that still know of the folder."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(folder) in line:
                found.append(line.decode(errors="replace"))
    return found


def interrupt_often(
    server: Server, task: Task, folder: Path, seconds: float, rounds: int, number: int
) -> None:
    """Interrupt the task at random moments again and again, then let it end once."""
    chooser = random.Random(f"{task} {number}")
    for _ in range(rounds):
        answer = server.run(task.command(folder), chooser.uniform(0, 1.1 * seconds), number)
        if visible(folder):
            check_complete(folder, task)
            remove_outputs(folder, task)
        else:
            assert answer["code"] != 0
        if number != signal.SIGKILL:
            assert names_in(folder) == [], answer
            # Before the command has begun, the signal ends it as any other program.
            assert answer["code"] in (0, 2, 128 + number, -number), answer
            assert "Traceback" not in answer["err"], answer
    answer = server.run(task.command(folder))
    assert answer["code"] == 0, answer["err"]
    assert set(names_in(folder)) == task.outputs
    check_complete(folder, task)
    assert left_running(folder) == []


@pytest.mark.parametrize("name", TASKS)
def test_a_kill_leaves_all_or_nothing_and_the_next_run_cleans_up(
    server: Server, duration: dict[str, float], tmp_path: Path, name: str
) -> None:
    interrupt_often(server, TASKS[name], tmp_path, duration[name], 4, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_many_kills_leave_all_or_nothing_and_the_next_run_cleans_up(
    server: Server, duration: dict[str, float], tmp_path: Path, name: str
) -> None:
    interrupt_often(server, TASKS[name], tmp_path, duration[name], 150, signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "number"),
    [("single", signal.SIGINT), ("components", signal.SIGTERM), ("single", signal.SIGHUP)],
)
def test_an_interrupted_run_leaves_nothing(
    server: Server, duration: dict[str, float], tmp_path: Path, name: str, number: int
) -> None:
    interrupt_often(server, TASKS[name], tmp_path, duration[name], 3, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", TASKS)
def test_many_interrupted_runs_leave_nothing(
    server: Server, duration: dict[str, float], tmp_path: Path, name: str, number: int
) -> None:
    interrupt_often(server, TASKS[name], tmp_path, duration[name], 100, number)


def test_two_runs_at_once_make_one_release(tmp_path: Path) -> None:
    task = TASKS["single"]
    runs = [
        subprocess.Popen(
            task.installed(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [run.communicate()[1] for run in runs]
    codes = [run.returncode for run in runs]

    assert sorted(codes) == [0, 2], said
    assert "exists already" in said[codes.index(2)]
    assert set(names_in(tmp_path)) == task.outputs
    check_complete(tmp_path, task)


IN_NAMESPACE = ["unshare", "--mount", "--propagation", "private", "sh", "-euc"]


ON_SMALL_DISK = """
mount -t tmpfs -o size="$1" tmpfs "$0"
shift
code=0
"$@" || code=$?
ls -A "$0"
exit $code
"""


@AS_ROOT
@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("single", 7),
        ("components", 7),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("single", "extract")),
    ],
)
def test_a_full_disk_leaves_nothing(tmp_path: Path, name: str, step: int) -> None:
    """At many sizes of the disk in MiB, from nearly nothing to just enough."""
    task = TASKS[name]
    succeeded = False
    for mebibytes in range(1, 40, step):
        size = f"{mebibytes}m"
        ended = subprocess.run(
            [*IN_NAMESPACE, ON_SMALL_DISK, tmp_path, size, *task.installed(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        left = set(ended.stdout.splitlines()[-len(task.outputs) :])
        if ended.returncode == 0:
            assert left == task.outputs
            succeeded = True
            break
        assert ended.returncode == 2, ended.stderr
        assert ended.stdout == "", (mebibytes, ended.stdout)
        assert ended.stderr.startswith("error: ")
        assert "the disk " in ended.stderr, ended.stderr
        assert str(tmp_path) in ended.stderr
        assert "hostile" not in ended.stderr
    assert succeeded


@AS_ROOT
@pytest.mark.parametrize("kilobytes", [0, 4, 64])
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_full_folder_for_temporary_files_is_named(
    single: Release, tmp_path: Path, command: str, kilobytes: int
) -> None:
    """Too small for the folder, its files, or the reader's report."""
    arguments: dict[str, list[str | Path]] = {
        "inspect": [BIN / "sam3d-inspect", CHECKPOINT],
        "verify": [BIN / "sam3d-verify", single.manifest, "--source", CHECKPOINT],
    }
    inodes = "nr_inodes=2" if kilobytes == 0 else "nr_inodes=0"
    program = f'mount -t tmpfs -o size={kilobytes or 4}k,{inodes} tmpfs "$0"; exec "$@"'
    ended = subprocess.run(
        [*IN_NAMESPACE, program, tmp_path, *arguments[command]],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: {tmp_path}: the disk is full")
    assert "hostile" not in ended.stderr
    assert "room for the reader's report" in ended.stderr or kilobytes == 0


@AS_ROOT
def test_a_full_disk_says_how_much_the_products_lack(tmp_path: Path) -> None:
    """Enough for the report; the products and their headers are of known sizes."""
    task = TASKS["extract"]
    ended = subprocess.run(
        [*IN_NAMESPACE, ON_SMALL_DISK, tmp_path, "1m", *task.installed(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (2, "")
    found = re.search(
        r"the disk is full: it has ([0-9]+) bytes left .* expected ([0-9]+) bytes", ended.stderr
    )
    assert found is not None, ended.stderr
    subprocess.run(task.installed(tmp_path), check=True, stdout=subprocess.DEVNULL)
    sizes = sum(path.stat().st_size for path in (tmp_path / "x").glob("*.safetensors"))
    assert sizes - (1 << 20) < int(found[2]) < sizes


@AS_ROOT
@pytest.mark.parametrize("name", TASKS)
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    task = TASKS[name]
    program = 'mount --bind "$0" "$0"; mount -o remount,ro,bind "$0"; exec "$@"'
    ended = subprocess.run(
        [*IN_NAMESPACE, program, tmp_path, *task.installed(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (2, "")
    assert "the file system is read-only" in ended.stderr
    assert names_in(tmp_path) == []


def test_a_dangling_link_is_no_destination(server: Server, tmp_path: Path) -> None:
    for name, task in TASKS.items():
        folder = tmp_path / name
        folder.mkdir()
        taken = min(task.outputs)
        (folder / taken).symlink_to(tmp_path / "elsewhere")

        answer = server.run(task.command(folder))

        assert answer["code"] == 2
        assert "exists already: it is a symbolic link" in answer["err"]
        assert names_in(folder) == [taken]
        assert not (tmp_path / "elsewhere").exists()

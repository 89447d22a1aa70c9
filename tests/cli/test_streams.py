"""Standard streams that can't be written: no traceback, no finding, and complete files stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from facts import TINY
from tiny_release import ASSET, Release, names_in

from sam3d_gguf.convert.verify import verify

BIN = Path(sys.executable).parent
LOST = "error: standard output can't be written: "
COMPLETE = ". The output files are complete\n"
REASONS = {
    "full": "No space left on device",
    "closed": "Bad file descriptor",
    "broken": "Broken pipe",
}


def start(how: str, name: str, arguments: Sequence[str | Path]) -> tuple[int, str]:
    """Run a command with a standard output that is full, closed, or read by nobody."""
    command = [BIN / f"sam3d-{name}", *arguments]
    if how == "closed":
        command = ["sh", "-c", 'exec "$0" "$@" >&-', *command]
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            command,
            stdout=full if how == "full" else writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    os.close(writer)
    return ended.returncode, ended.stderr


def unwritten(how: str) -> tuple[int, str]:
    """How a command ends whose output can't be written, where that is all that it gives."""
    return (141, "") if how == "broken" else (2, f"{LOST}{REASONS[how]}\n")


@pytest.mark.parametrize("how", REASONS)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("convert", ["--help"]),
        ("extract", ["body", "--help"]),
        ("inspect", ["--help"]),
        ("run", []),
        ("parity", ["--version"]),
    ],
)
def test_help_that_cannot_be_written_is_no_traceback(
    how: str, name: str, arguments: list[str | Path]
) -> None:
    assert start(how, name, arguments) == unwritten(how), name


WAYS: list[tuple[str, tuple[str, ...]]] = [
    ("full", ("--json",)),
    ("closed", ()),
    ("broken", ("--json",)),
    ("broken", ()),
]


@pytest.mark.parametrize(("how", "option"), WAYS)
def test_a_finding_that_cannot_be_written_is_none(
    how: str, option: Sequence[str], single: Release, tmp_path: Path
) -> None:
    wrong = single.copy(tmp_path)
    wrong.mhr.write_bytes(wrong.mhr.read_bytes()[:-1] + b"\xaa")
    capture = TINY / "expected.safetensors"
    judge = ("--reference", capture, "--candidate", capture, "--rules", TINY / "rules.json")

    assert start(how, "inspect", [single.mhr, *option]) == unwritten(how)
    assert start(how, "verify", [single.manifest, *option]) == unwritten(how)
    assert start(how, "verify", [wrong.manifest, *option]) == unwritten(how)
    assert start(how, "parity", [*judge, *option]) == unwritten(how)
    assert start(how, "run", ["--list-devices", *option]) == unwritten(how)


Task = Callable[[Release, Path], tuple[str, list[str | Path]]]
TASKS: dict[str, Task] = {
    "convert": lambda single, folder: (
        "convert",
        [
            *("mhr", "--extraction", single.mhr_extraction, "--allow-unpinned"),
            *("--out", folder / "mhr.gguf"),
        ],
    ),
    "extract": lambda single, folder: (
        "extract",
        ["mhr", "--checkpoint", ASSET, "--allow-unpinned", "--out", folder / "x"],
    ),
    "parity": lambda single, folder: (
        "parity",
        [
            *("--reference", TINY / "expected.safetensors", "--rules", TINY / "rules.json"),
            *("--candidate", TINY / "expected.safetensors", "--report", folder / "report.json"),
        ],
    ),
}


@pytest.mark.parametrize(
    ("task", "how", "option"),
    [*(("convert", *way) for way in WAYS), ("extract", "full", ()), ("parity", "closed", ())],
)
def test_complete_files_are_said_to_be_complete(
    task: str, option: Sequence[str], how: str, single: Release, tmp_path: Path
) -> None:
    name, arguments = TASKS[task](single, tmp_path)

    ended = start(how, name, [*arguments, *option])

    assert ended == (3, "" if how == "broken" else f"{LOST}{REASONS[how]}{COMPLETE}")
    assert len(names_in(tmp_path)) == (2 if task == "convert" else 1)
    if task == "convert":
        assert verify([tmp_path / "manifest.json"]).is_good


@pytest.mark.parametrize("how", ["full", "broken"])
def test_a_batch_that_fails_is_no_success_though_its_list_got_lost(
    how: str, single: Release, tmp_path: Path
) -> None:
    good = {"name": "a", "image": str(TINY / "input.png"), "boxes": [[52, 8.5, 141.25, 139]]}
    bad = {**good, "name": "b", "boxes": [[500, 500, 600, 600]]}
    batch = tmp_path / "list.json"
    batch.write_text(json.dumps({"schema_version": 1, "images": [good, bad]}))
    models = ("--model", single.body, "--mhr", single.mhr, "--out", tmp_path / "out")

    code, said = start(how, "run", ["body", *models, "--batch", batch, "--features-only"])

    assert (code, "error: photo 'b', box 0" in said) == (2, True), said
    assert len(names_in(tmp_path / "out" / "a")) == 2


@pytest.mark.parametrize("name", ["convert", "inspect"])
def test_errors_that_cannot_be_written_end_with_2(name: str) -> None:
    for arguments in (["--no-such-option"], ["/absent"]):
        for redirection in ("2>/dev/full", "2>&-", ">&- 2>&- <&-"):
            program = f'exec "$0" "$@" {redirection}'
            command: list[str | Path] = ["sh", "-c", program, BIN / f"sam3d-{name}", *arguments]
            assert subprocess.run(command, check=False).returncode == 2, redirection


def test_names_are_printed_whatever_the_locale(single: Release, tmp_path: Path) -> None:
    path = tmp_path / "mödel.gguf"
    path.write_bytes(single.mhr.read_bytes())
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}

    ended = subprocess.run(
        [BIN / "sam3d-verify", path], capture_output=True, check=False, env=environment
    )

    assert ended.returncode == 0, ended.stderr
    assert b"m\\xf6del.gguf" in ended.stdout

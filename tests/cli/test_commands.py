"""The commands: exit codes, one document on standard output, errors in words, text made safe."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from checkpoint_bytes import Call, Global
from forged_gguf import forge
from rich.table import Table
from tiny_release import (
    ASSET,
    CHECKPOINT,
    CONFIG,
    Release,
    Source,
    canonical_safetensors,
    checkpoint_of,
    flip,
    names_in,
    read_json,
    sha256,
)
from typer.testing import CliRunner

from sam3d_gguf.cli import convert, extract, inspect, terminal, verify
from sam3d_gguf.convert.gguf_format import string
from sam3d_gguf.schemas.documents import validate

BIN = Path(sys.executable).parent
APPS: dict[str, typer.Typer] = {
    "sam3d-convert": convert.app,
    "sam3d-extract": extract.app,
    "sam3d-inspect": inspect.app,
    "sam3d-verify": verify.app,
}
SUBCOMMANDS = [
    ("sam3d-convert", ()),
    ("sam3d-convert", ("body",)),
    ("sam3d-convert", ("mhr",)),
    ("sam3d-extract", ()),
    ("sam3d-extract", ("body",)),
    ("sam3d-extract", ("mhr",)),
    ("sam3d-inspect", ()),
    ("sam3d-verify", ()),
]
BODY = ("body", "--checkpoint", CHECKPOINT, "--config", CONFIG)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    def document(self) -> dict[str, Any]:
        """The one document on standard output."""
        found: dict[str, Any] = json.loads(self.out)
        assert self.err == ""
        return found


def run(command: str, *arguments: str | Path) -> Ended:
    """Run a command in this process."""
    result = CliRunner().invoke(APPS[command], [str(a) for a in arguments], prog_name=command)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


def start(command: str, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run an installed command."""
    return subprocess.run(
        [BIN / command, *arguments], capture_output=True, text=True, check=False, **options
    )


# Options


@pytest.mark.parametrize(("command", "subcommand"), SUBCOMMANDS)
def test_help(command: str, subcommand: Sequence[str]) -> None:
    for option in ("--help", "-h"):
        ended = run(command, *subcommand, option)
        assert (ended.code, ended.err) == (0, "")
        assert "Usage" in ended.out
        assert "--debug" in ended.out or not subcommand


@pytest.mark.parametrize("command", APPS)
def test_version(command: str) -> None:
    ended = start(command, "--version")

    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"sam3d-gguf {version('sam3d-gguf')}\n"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("sam3d-convert", ("body",)),
        ("sam3d-convert", ("body", "--out", "x", "--layout", "double")),
        ("sam3d-convert", ("body", "--out", "x", "--precision", "f16")),
        ("sam3d-convert", ("body", "--out", "x", "--sandbox", "none")),
        ("sam3d-convert", ("body", "--out", "x", "--force")),
        ("sam3d-convert", ("objects", "--out", "x")),
        ("sam3d-convert", ("mhr", "--out", "x", "--layout", "single")),
        ("sam3d-extract", ("body", "--out", "x")),
        ("sam3d-extract", ("body", "--checkpoint", "x")),
        ("sam3d-verify", ("--source", "x")),
        ("sam3d-inspect", ("a", "b")),
    ],
)
def test_wrong_options_end_with_2(command: str, arguments: Sequence[str]) -> None:
    ended = run(command, *arguments)

    assert (ended.code, ended.out) == (2, "")
    assert "Usage" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can own files of others")
def test_files_that_may_not_be_read_are_refused_in_our_words(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    os.chown(secret, 12345, 12345)
    # Root without the right to read everything.
    without = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    for command, arguments in (
        ("sam3d-inspect", [secret]),
        ("sam3d-verify", [secret]),
        ("sam3d-extract", ["body", "--checkpoint", secret, "--out", tmp_path / "x"]),
        ("sam3d-convert", ["body", "--checkpoint", secret, "--out", tmp_path / "x.gguf"]),
        ("sam3d-convert", [*BODY, "--mhr", secret, "--out", tmp_path / "x.gguf"]),
    ):
        ended = subprocess.run(
            [*without, BIN / command, *arguments], capture_output=True, text=True, check=False
        )
        assert (ended.returncode, ended.stdout) == (2, "")
        expected = f"error: {secret}: the file can't be opened: Permission denied"
        assert ended.stderr.startswith(expected), ended.stderr


@pytest.mark.parametrize("command", APPS)
def test_values_that_are_empty_are_refused(command: str) -> None:
    for arguments, name in ((["--base", ""], "--base"), (["--base="], "--base"), ([""], "an arg")):
        ended = run(command, *arguments)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith(f"error: {name}")
        assert ended.err.endswith("the value is empty\n")


def test_an_image_without_docker_is_refused() -> None:
    for command, arguments in (
        ("sam3d-inspect", (CHECKPOINT,)),
        ("sam3d-verify", (CHECKPOINT,)),
        ("sam3d-extract", ("body", "--checkpoint", CHECKPOINT, "--out", "x")),
        ("sam3d-convert", ("body", "--checkpoint", CHECKPOINT, "--out", "x")),
    ):
        ended = run(command, *arguments, "--base", "python:3.11")
        assert (ended.code, ended.out) == (2, "")
        assert "--base goes with --sandbox docker" in ended.err


# What they do


def test_convert_prints_what_it_wrote(single: Release, tmp_path: Path) -> None:
    out = tmp_path / "body.gguf"
    ended = run(
        *("sam3d-convert", "body", "--extraction", single.extraction, "--config", CONFIG),
        *("--mhr", single.mhr_extraction, "--out", out, "--allow-unpinned"),
    )

    assert (ended.code, ended.err) == (0, "")
    for name in ("body.gguf", "mhr.gguf"):
        assert f"{sha256(single.folder / name)}  {name}\n" in ended.out
    assert "complete, unpinned; precision source" in ended.out
    assert "parameter_names" in ended.out
    assert str(tmp_path / "manifest.json") in ended.out
    assert names_in(tmp_path) == ["body.gguf", "manifest.json", "mhr.gguf"]


def test_convert_prints_the_manifest_as_json(single: Release, tmp_path: Path) -> None:
    ended = run(
        *("sam3d-convert", "mhr", "--extraction", single.mhr_extraction, "--json"),
        *("--out", tmp_path / "mhr.gguf", "--allow-unpinned"),
    )

    assert ended.code == 0
    assert ended.out.encode() == (tmp_path / "manifest.json").read_bytes()
    validate(ended.document(), "manifest", where="out")


def test_convert_takes_all_its_options(single: Release, tmp_path: Path) -> None:
    ended = run(
        *("sam3d-convert", *BODY, "--mhr", ASSET, "--out", tmp_path / "b.gguf"),
        *("--precision", "f32", "--manifest", tmp_path / "m.json", "--layout", "single"),
        *("--keep-safetensors", tmp_path / "kept", "--allow-unpinned", "--sandbox", "bubblewrap"),
    )

    assert (ended.code, ended.err) == (0, "")
    assert names_in(tmp_path) == ["b.gguf", "kept", "m.json", "mhr.gguf"]
    assert names_in(tmp_path / "kept") == names_in(single.extraction)
    assert run("sam3d-verify", tmp_path / "m.json").code == 0


def test_components_say_whether_they_conform(single: Release, tmp_path: Path) -> None:
    ended = run(
        *("sam3d-convert", "body", "--extraction", single.extraction, "--config", CONFIG),
        *("--mhr", single.mhr_extraction, "--layout", "components", "--allow-unpinned"),
        *("--out", tmp_path / "native"),
    )

    assert ended.code == 0
    assert "native contract: does not conform: other dimensions" in ended.out


def test_extract_prints_its_report_as_json(tmp_path: Path) -> None:
    ended = run(
        *("sam3d-extract", "mhr", "--checkpoint", ASSET, "--out", tmp_path / "out", "--json"),
        "--allow-unpinned",
    )

    assert ended.code == 0
    assert ended.out.encode() == (tmp_path / "out" / "extraction.json").read_bytes()
    validate(ended.document(), "extraction", where="out")


def test_extract_prints_what_it_wrote(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = run(
        *("sam3d-extract", "body", "--checkpoint", CHECKPOINT, "--out", out, "--allow-unpinned")
    )

    assert (ended.code, ended.err) == (0, "")
    for name in ("backbone.safetensors", "other.safetensors"):
        assert f"{sha256(out / name)}  {name}\n" in ended.out
    assert f"source: model.ckpt, SHA-256 {sha256(CHECKPOINT)}, unpinned" in ended.out


def test_verify_says_good(single: Release) -> None:
    ended = run("sam3d-verify", single.manifest)

    assert (ended.code, ended.err) == (0, "")
    assert "consistent (complete, unpinned); origin not proven" in ended.out
    assert ended.out.count("good") == 2


def test_verify_says_wrong_with_exit_code_1(single: Release, tmp_path: Path) -> None:
    copy = single.copy(tmp_path)
    flip(copy.body, copy.body.stat().st_size - 200_000)

    ended = run("sam3d-verify", copy.manifest)
    assert (ended.code, ended.err) == (1, "")
    assert "FAILED" in ended.out
    assert "WRONG" in ended.out
    assert "body.gguf: the tensor" in ended.out

    found = run("sam3d-verify", copy.manifest, "--json")
    assert found.code == 1
    assert found.document()["good"] is False
    validate(found.document(), "verification", where="out")


def test_verify_that_cannot_say_ends_with_2(single: Release, tmp_path: Path) -> None:
    for arguments in (
        (tmp_path / "absent.json",),
        (tmp_path / "absent.gguf",),
        (single.manifest, "--source", tmp_path / "absent.ckpt"),
        (single.manifest, "--source", CONFIG),
        (single.manifest, "--expect-sha256", "abc"),
        (single.manifest, single.body),
    ):
        ended = run("sam3d-verify", *arguments, "--json")
        assert (ended.code, ended.out) == (2, ""), arguments
        assert ended.err.startswith("error: ")


def test_verify_with_a_good_and_a_wrong_expected_hash(single: Release) -> None:
    good = run("sam3d-verify", single.manifest, "--expect-sha256", sha256(single.manifest))
    wrong = run("sam3d-verify", single.manifest, "--expect-sha256", "0" * 64)

    assert (good.code, wrong.code) == (0, 1)
    assert "origin proven by the expected SHA-256 of manifest.json" in good.out
    assert "verified (complete, unpinned)" in good.out
    assert "nothing has the expected SHA-256" in wrong.out


@pytest.mark.parametrize("kind", ["checkpoint", "asset", "safetensors", "gguf"])
def test_inspect_prints_what_a_file_holds(single: Release, kind: str) -> None:
    path = {
        "checkpoint": CHECKPOINT,
        "asset": ASSET,
        "safetensors": single.extraction / "other.safetensors",
        "gguf": single.mhr,
    }[kind]

    ended = run("sam3d-inspect", path)
    assert (ended.code, ended.err) == (0, "")
    assert f"SHA-256 {sha256(path)}" in ended.out
    found = run("sam3d-inspect", path, "--json")
    assert found.code == 0
    validate(found.document(), "inspection", where="out")
    assert found.document()["sha256"] == sha256(path)


# Errors


def refusals(tmp_path: Path) -> list[tuple[str, tuple[str | Path, ...]]]:
    out = tmp_path / "out"
    return [
        ("sam3d-convert", ("body", "--checkpoint", CONFIG, "--out", out, "--allow-unpinned")),
        ("sam3d-convert", ("mhr", "--checkpoint", CONFIG, "--out", out, "--allow-unpinned")),
        ("sam3d-convert", ("body", "--checkpoint", CHECKPOINT, "--out", out)),
        ("sam3d-convert", ("body", "--out", out)),
        ("sam3d-extract", ("body", "--checkpoint", CHECKPOINT, "--out", out)),
        ("sam3d-extract", ("mhr", "--checkpoint", CHECKPOINT, "--out", out, "--allow-unpinned")),
        ("sam3d-inspect", (CONFIG,)),
        ("sam3d-inspect", ("/dev/zero",)),
        ("sam3d-inspect", (tmp_path,)),
        ("sam3d-verify", (tmp_path / "absent",)),
    ]


def test_a_refusal_is_one_message_on_standard_error(tmp_path: Path) -> None:
    for command, arguments in refusals(tmp_path):
        ended = run(command, *arguments)
        assert (ended.code, ended.out) == (2, ""), arguments
        assert ended.err.startswith("error: ")
        assert "Traceback" not in ended.err
        assert names_in(tmp_path) == []


def test_debug_adds_the_traceback(tmp_path: Path) -> None:
    ended = run("sam3d-inspect", tmp_path, "--debug")

    assert ended.code == 2
    assert "Traceback (most recent call last)" in ended.err
    assert "error: " in ended.err


@pytest.mark.parametrize("debug", [False, True])
def test_a_fault_of_the_tool_is_called_one(monkeypatch: pytest.MonkeyPatch, debug: bool) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("\x1b[31m[red]oops")

    monkeypatch.setattr(inspect, "inspect", broken)
    ended = run("sam3d-inspect", CONFIG, *(["--debug"] if debug else []))

    assert (ended.code, ended.out) == (2, "")
    assert "internal error: RuntimeError: \\x1b[31m[red]oops" in ended.err
    assert ("Traceback" in ended.err) is debug


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(28, "No space left on device"), KeyboardInterrupt()]
)
def test_what_the_system_refuses_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(inspect, "inspect", broken)
    ended = run("sam3d-inspect", CONFIG)

    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert "internal" not in ended.err


def test_inspect_lists_what_has_no_meaning_first(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    harmless = [Global("torch", f"{kind}Storage") for kind in ("Half", "Int", "Long", "Short")]
    harmless += [Global("torch", f"float{bits}") for bits in (16, 32, 64)]
    harmless += [Global("torch", f"int{bits}") for bits in (8, 16, 32, 64)]
    harmless += [Global("torch", name) for name in ("bool", "uint8", "Size", "device")]
    extra = [*harmless, Global("os", "system"), Global("numpy", "dtype")]
    path.write_bytes(checkpoint_of({"a": Source("F32", (1,), bytes(4))}, {"extra": extra}))

    lines = run("sam3d-inspect", path).out.splitlines()

    assert "unknown global named: os.system" in lines
    assert "unknown global named: numpy.dtype" in lines
    assert sum(line.startswith("global named: ") for line in lines) == 13
    assert any("more; --json lists all" in line for line in lines)


# Text from input

EVIL = "\x1b[2J\x1b]0;owned\x07[red]a[/red][/]\n:smile: \u202e\\ [link=file:///x]b"
SAFE = "\\x1b[2J\\x1b]0;owned\\x07[red]a[/red][/]\\n:smile: \\u202e\\ [link=file:///x]b"


def is_safe(text: str) -> bool:
    """Whether a text holds nothing but printable characters and line ends."""
    return all(c.isprintable() or c == "\n" for c in text)


def test_names_of_tensors_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "evil.safetensors"
    path.write_bytes(canonical_safetensors({EVIL: np.zeros(1, np.float32)}))

    ended = run("sam3d-inspect", path)
    assert ended.code == 0
    assert is_safe(ended.out)
    assert f"│ {SAFE} │" in ended.out
    (tensor,) = run("sam3d-inspect", path, "--json").document()["tensors"]
    assert tensor["name"] == EVIL


def test_names_and_globals_of_a_checkpoint_are_escaped(tmp_path: Path) -> None:
    path, markup = tmp_path / "evil.ckpt", "[red]a[/red][/]:smile: [link=file:///x]b\\"
    tensors = {markup: Source("F32", (1,), bytes(4))}
    hook = Call(Global("os", "system\x1b[31m"), (EVIL,))
    path.write_bytes(checkpoint_of(tensors, {"hook" + EVIL: hook}))

    ended = run("sam3d-inspect", path)
    assert ended.code == 0
    assert is_safe(ended.out)
    assert f"│ {markup} │" in ended.out
    assert "os.system\\x1b[31m" in ended.out
    refused = run(
        *("sam3d-convert", "body", "--checkpoint", path, "--config", CONFIG),
        *("--out", tmp_path / "body.gguf", "--allow-unpinned"),
    )
    assert (refused.code, refused.out) == (2, "")
    assert is_safe(refused.err)
    assert f"{markup} is F32 [1]" in refused.err


def test_names_that_are_refused_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "evil.ckpt"
    path.write_bytes(checkpoint_of({EVIL: Source("F32", (1,), bytes(4))}))

    ended = run("sam3d-inspect", path)
    assert (ended.code, ended.out) == (2, "")
    assert is_safe(ended.err)
    assert ended.err.count("\n") == 1
    assert "owned" in ended.err


def test_metadata_is_escaped(single: Release, tmp_path: Path) -> None:
    copy = single.copy(tmp_path)
    forge(copy.mhr, lambda parts: parts.metadata.update({"general.author": string(EVIL)}))

    ended = run("sam3d-inspect", copy.mhr)
    assert is_safe(ended.out)
    assert f"general.author = {SAFE}" in ended.out
    assert is_safe(run("sam3d-verify", copy.mhr).out)
    forge(copy.mhr, lambda parts: parts.metadata.update({"general.architecture": string(EVIL)}))
    assert is_safe(run("sam3d-verify", copy.mhr).out)


def test_names_of_files_are_escaped(single: Release, tmp_path: Path) -> None:
    name = EVIL.replace("/", "|") + os.fsdecode(b"\xff")
    safetensors, gguf = tmp_path / f"{name}.safetensors", tmp_path / f"{name}.gguf"
    safetensors.write_bytes(canonical_safetensors({"a": np.zeros(1, np.float32)}))
    gguf.write_bytes(single.mhr.read_bytes())

    for command, path, code in (
        ("sam3d-inspect", safetensors, 0),
        ("sam3d-inspect", gguf, 0),
        ("sam3d-verify", gguf, 0),
        ("sam3d-verify", safetensors, 1),
    ):
        ended = run(command, path)
        assert (ended.code, ended.err) == (code, "")
        assert is_safe(ended.out)
        assert run(command, path, "--json").document()
    for command in ("sam3d-inspect", "sam3d-verify"):
        ended = run(command, tmp_path / f"absent{name}")
        assert ended.code == 2
        assert is_safe(ended.err)


def test_a_manifest_is_escaped(single: Release, tmp_path: Path) -> None:
    copy = single.copy(tmp_path)
    document = read_json(copy.manifest)
    document["files"][0]["architecture"] = "[red]x[/]"
    document["files"][0]["name"] = EVIL
    copy.manifest.write_text(json.dumps(document))

    ended = run("sam3d-verify", copy.manifest)
    assert ended.code == 1
    assert is_safe(ended.out)


@pytest.mark.parametrize(
    "text", [EVIL, "[bold]", "[/]", "\\[red]", "\\", "\\\\", "a\\", ":warning:", "[", "]", "[[x]]"]
)
def test_a_cell_is_printed_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("title")
    table.add_row(terminal.cell(text))
    terminal.out.print(f"|{terminal.cell(text)}|", style="bold")
    terminal.out.print(table)

    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    line, *table_lines = capsys.readouterr().out.splitlines()
    assert line == f"|{shown}|"
    assert f"│ {shown}" in table_lines[-2]


# Terminals and pipes


def in_terminal(*arguments: str | Path) -> bytes:
    """What a command writes to standard error, if that is a terminal."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen(
        [str(a) for a in arguments], stdout=subprocess.DEVNULL, stderr=follower, env=environment
    ) as process:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):
            while chunk := os.read(leader, 65536):
                shown += chunk
        os.close(leader)
    assert process.returncode == 0
    return shown


def test_progress_is_shown_in_a_terminal_only(single: Release) -> None:
    shown = in_terminal(BIN / "sam3d-verify", single.manifest)
    assert b"Verify body.gguf" in shown
    assert b"Verify mhr.gguf" in shown

    piped = start("sam3d-verify", single.manifest)
    assert (piped.returncode, piped.stderr) == (0, "")
    assert is_safe(piped.stdout)


def test_nothing_is_imported_that_only_some_runs_need() -> None:
    program = (
        "import sys, sam3d_gguf.cli.convert, sam3d_gguf.cli.extract;"
        "sys.exit(any(name in sys.modules for name in ('docker', 'torch', 'requests')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_handler_of_a_signal_is_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    run("sam3d-inspect", CONFIG)
    assert signal.getsignal(number) is before


def test_a_call_that_the_checkpoint_asks_for_is_told_and_recorded(tmp_path: Path) -> None:
    hostile = tmp_path / "model.ckpt"
    with zipfile.ZipFile(CHECKPOINT) as whole, zipfile.ZipFile(hostile, "w") as edited:
        for member in whole.namelist():
            data = whole.read(member)
            if member.endswith("/data.pkl"):
                # Behind the protocol's two bytes; the result is dropped.
                data = data[:2] + b"cos\nsystem\nX\x04\0\0\0true\x85R0" + data[2:]
            edited.writestr(member, data)
    arguments = ("body", "--checkpoint", hostile, "--config", CONFIG, "--allow-unpinned", "--out")

    ended = run("sam3d-convert", *arguments, tmp_path / "body.gguf")

    told = " ".join(ended.out.split())
    assert "warning: body.checkpoint: os.system x1 at (dropped)" in told, ended
    left_out = json.loads((tmp_path / "manifest.json").read_text())["left_out"]
    assert [item["what"] for item in left_out] == ["os.system x1 at (dropped)"]
    verified = run("sam3d-verify", tmp_path / "manifest.json", "--source", hostile)
    assert verified.code == 0, verified

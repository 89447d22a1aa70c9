"""Every command that the documentation shows, run in order, page by page.

The pages show commands on Meta's files, which are gated. Here the synthetic files of
`tests/fixtures/tiny-body-a` and `tests/fixtures/tiny-objects-a` lie under the official names; `STAND_IN` is all in which their commands
and output differ from those of the official files. Commands on files in `finetuned/` show what
happens to files that aren't official, and are run and compared as they stand.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ball_scene
import objects_facts
import pytest
import tiny_objects
from doc_pages import PAGES, ROOT, Example, examples, fences, indented_code
from facts import TINY
from PIL import Image

from sam3d_gguf.convert.contract import load_contract
from sam3d_gguf.convert.native import load_native_components
from sam3d_gguf.manifests.known_answers import load_known_answers

UNOFFICIAL = "finetuned"

_ANSWERS = load_known_answers()
_BODY = load_contract("body").official()
_POSE = load_native_components()["body.pose_branch"].tensors(_BODY)


@dataclass(frozen=True)
class StandIn:
    """What tells the stand-ins from the official files.

    Attributes:
        appended: to each command of that name.
        rows: tensors, bytes and published hash of the official files, in tables that begin with the
            file's name; None where a page can't say it.
        replaced: patterns in the output, and what the official files would give there.
    """

    appended: dict[str, str]
    rows: dict[str, tuple[int | None, int | None, str | None]]
    replaced: tuple[tuple[str, str], ...]

    def command(self, command: str) -> str:
        """What is run for a command of a page."""
        name = command.split(" ", 1)[0]
        return command + self.appended.get(name, "")

    def output(self, text: str) -> str:
        """What the official files would have given."""
        for pattern, official in self.replaced:
            text = re.sub(pattern, official, text, flags=re.MULTILINE)
        return "\n".join(map(self._row, text.split("\n")))

    def _row(self, line: str) -> str:
        cells = [cell.strip() for cell in line.split("│")]
        row = self.rows.get(cells[1]) if len(cells) > 4 else None
        if row is None:
            return line
        numbers = [None if number is None else f"{number:,}" for number in row[1:2]]
        official = [None if row[0] is None else str(row[0]), *numbers]
        for index, cell in enumerate(cells):
            if re.fullmatch(r"[0-9,]+", cell) and official:
                cells[index] = official.pop(0) or cell
            elif cell == "none" and row[2]:
                cells[index] = row[2]
        return " │ ".join(cells)


STAND_IN = StandIn(
    appended={"sam3d-convert": " --allow-unpinned", "sam3d-extract": " --allow-unpinned"},
    rows={
        "body.gguf": (len(_BODY.tensors), 2_131_905_472, None),
        "slat_decoder_mesh.gguf": (120, 363_727_328, None),
        "slat_decoder_gs_4.gguf": (101, 170_253_920, None),
        "slat_decoder_gs.gguf": (101, 171_460_352, None),
        "ss_decoder.gguf": (74, 147_600_096, None),
        "mhr-lod1.gguf": (_ANSWERS.mhr_gguf.tensors, _ANSWERS.mhr_gguf.bytes, "equal"),
        "body-dinov3-backbone.gguf": (
            _ANSWERS.body_backbone_safetensors.tensors,
            _ANSWERS.body_backbone_gguf.bytes,
            "equal",
        ),
        "body-pose-branch.gguf": (len(_POSE), _ANSWERS.body_pose_branch_gguf.bytes, "equal"),
        "backbone.safetensors": (
            _ANSWERS.body_backbone_safetensors.tensors,
            _ANSWERS.body_backbone_safetensors.bytes,
            "equal",
        ),
        "other.safetensors": (
            _ANSWERS.body_other_safetensors.tensors,
            _ANSWERS.body_other_safetensors.bytes,
            "equal",
        ),
    },
    replaced=(
        (r"^note: the archive has no parameter_names: they are numbers\n", ""),
        (r"^native contract: does not conform: other dimensions$", "native contract: conforms"),
        (r"^442 tensors of", f"{_ANSWERS.body_checkpoint.tensors} tensors of"),
        # A file that was made here is not among the pins, whatever it was made from.
        (r"^((?!.*: a (?:GGUF|safetensors) file,).*)\bunpinned\b", r"\1pinned"),
    ),
)


def run(page: Path, scratch: Path) -> None:
    """Run all commands of a page in a folder that holds the files it begins with."""
    text = page.read_text()
    for program in fences(text, "python"):
        first = program.split("\n", 1)[0]
        if first.startswith("# ") and first.endswith(".py"):
            (scratch / first.removeprefix("# ")).write_text(program)
    for example in examples(text):
        check(example, scratch)


def check(example: Example, scratch: Path) -> None:
    """Run a command and compare exit code and output."""
    official = UNOFFICIAL not in example.command
    command = STAND_IN.command(example.command) if official else example.command
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=scratch,
        env=environment(scratch),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        timeout=300,
        check=False,
        text=True,
        encoding="utf-8",
    )
    output = STAND_IN.output(done.stdout) if official else done.stdout
    assert done.returncode == example.exit_code, f"{command}\n{done.stdout}"
    assert matches(example.output, output), f"{command}\n{done.stdout}\nshown:\n{example.output}"


def environment(scratch: Path) -> dict[str, str]:
    """The commands of this interpreter's environment, and a terminal wide enough for tables."""
    return {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.defpath, "/usr/sbin")),
        "HOME": str(scratch),
        "LANG": "C.UTF-8",
        "COLUMNS": "120",
    }


def matches(shown: str, found: str) -> bool:
    """Whether output is as shown, but for the widths of tables and what `...` stands for."""
    pieces = (re.escape(piece) for piece in plain(shown).split("..."))
    return re.fullmatch(".*?".join(pieces), plain(found), re.DOTALL) is not None


def plain(text: str) -> str:
    """Text without the lines between a table's rows, and with single spaces."""
    lines = (" ".join(re.sub("[│┃]", " ", line).split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line and not re.fullmatch("[─━┌-╬ ]+", line))


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A folder that holds the stand-ins under the official names, and a photo."""
    (tmp_path / "assets").mkdir()
    (tmp_path / UNOFFICIAL).mkdir()
    for folder in (tmp_path, tmp_path / UNOFFICIAL):
        shutil.copy(TINY / "model.ckpt", folder)
        shutil.copy(TINY / "model_config.yaml", folder)
    shutil.copy(TINY / "mhr_model.stub.pt", tmp_path / "assets" / "mhr_model.pt")
    tiny_objects.runnable(tmp_path / "checkpoints")
    (tmp_path / "moge").mkdir()
    shutil.copy(objects_facts.TINY_MOGE / "model.pt", tmp_path / "moge")
    ball_scene.write(tmp_path)
    for kind in ("inputs-ss-decoder.safetensors", "expected-ss-decoder.safetensors"):
        shutil.copy(objects_facts.TINY / kind, tmp_path)
    shutil.copy(objects_facts.TINY / "rules-ss-decoder.json", tmp_path)
    Image.open(TINY / "input.png").save(tmp_path / "photo.jpg")
    return tmp_path


def with_examples() -> list[Path]:
    """The pages that show commands."""
    return [page for page in PAGES if examples(page.read_text())]


@pytest.mark.parametrize("page", with_examples(), ids=lambda page: page.name)
def test_commands(page: Path, scratch: Path) -> None:
    run(page, scratch)


def test_the_users_pages_show_commands() -> None:
    names = {page.name for page in with_examples()}
    assert names >= {
        "README.md",
        "convert.md",
        "verify.md",
        "inspect.md",
        "formats.md",
        "running.md",
        "converting-objects.md",
        "objects.md",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_of_ours_stands_where_it_is_not_run(page: Path) -> None:
    text = page.read_text()
    other = [
        line for block in (*fences(text, ""), *fences(text, "sh")) for line in block.split("\n")
    ]
    assert [line for line in (*indented_code(text), *other) if line.startswith("sam3d-")] == []


def test_the_official_files_stand_in_for_no_others() -> None:
    assert (TINY / "model.ckpt").is_relative_to(ROOT / "tests")
    assert STAND_IN.command("sam3d-verify manifest.json") == "sam3d-verify manifest.json"
    assert STAND_IN.output("x.gguf: a GGUF file, 3 bytes, unpinned") == (
        "x.gguf: a GGUF file, 3 bytes, unpinned"
    )


@pytest.mark.parametrize(
    ("shown", "found", "same"),
    [
        ("┏━━┓\n┃ a ┃\n│ 1 │ ...  │", "┏━━━━┓\n┃ a   ┃\n│ 1 │ 2,000 │ 3 │", True),
        ("one\n...\nthree", "one\ntwo\ntwo\nthree", True),
        ("one\nthree", "one\ntwo\nthree", False),
        ("one", "one\ntwo", False),
        ("pinned", "unpinned", False),
        ("a.b", "axb", False),
        ("", "one", False),
    ],
)
def test_matches(shown: str, found: str, same: bool) -> None:
    assert matches(shown, found) is same


@pytest.mark.parametrize(
    ("output", "code"), [("two\n", 0), ("...\n", 1), ("# exits 1\n", 0), ("one\n# exits 2\n", 0)]
)
def test_a_command_that_does_otherwise_is_noticed(output: str, code: int, tmp_path: Path) -> None:
    (example,) = examples(f"```console\n$ echo one; exit {code}\n{output}```\n")
    with pytest.raises(AssertionError):
        check(example, tmp_path)

"""`sam3d-run objects --component` writes what `sam3d-parity` passes, or refuses with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from objects_components import fixture
from typer.testing import CliRunner, Result

from sam3d_gguf.cli import parity
from sam3d_gguf.cli import run as run_command
from sam3d_gguf.runtime.tensor_files import TensorFile, write_tensors

NAME = "gaussian-decoder-4"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(run_command.app, ["objects", *map(str, arguments)])


def given(name: str = NAME) -> tuple[object, ...]:
    return "--component", name, "--inputs", fixture(f"inputs-{NAME}.safetensors")


def test_a_component_s_tensors_pass_the_parity(objects: Path, tmp_path: Path) -> None:
    taps = tmp_path / "taps.safetensors"
    found = run("--models", objects, *given(), "--taps", taps)
    assert found.exit_code == 0, found.stderr
    assert found.stdout.split() == [str(taps)]
    with TensorFile(taps) as file:
        assert {"tool", "device", "objects.slat_decoder_gs_4.content_sha256"} <= set(file.metadata)
    arguments = ["--reference", fixture(f"expected-{NAME}.safetensors"), "--candidate", taps]
    rules = ["--rules", fixture(f"rules-{NAME}.json")]
    judged = CliRunner().invoke(parity.app, [*map(str, arguments), *map(str, rules)])
    assert judged.exit_code == 0, judged.output


def test_a_file_with_another_value_is_named(objects: Path, tmp_path: Path) -> None:
    with TensorFile(fixture(f"inputs-{NAME}.safetensors")) as file:
        tensors = {name: file.read(name) for name in file.tensors}
    tensors["coords"][0] = 99
    write_tensors(tmp_path / "in.safetensors", tensors)
    inputs = ("--component", NAME, "--inputs", tmp_path / "in.safetensors")
    found = run("--models", objects, *inputs, "--taps", tmp_path / "new")
    assert found.exit_code == 2
    assert f"{tmp_path / 'in.safetensors'}: row 0 of coords is" in found.stderr.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--component", NAME), "a component needs its name and two files"),
        (("--inputs", "x"), "a component needs its name and two files"),
        ((*given(), "--taps", "new", "--seed", 0), "--component stands alone"),
        ((*given(), "--taps", "new", "--gaussians", 4), "--component stands alone"),
        ((*given(), "--taps", "new", "--out", "x"), "--component stands alone"),
        ((*given("gaussian-decoder"), "--taps", "new"), "no component 'gaussian-decoder'"),
        ((*given("mesh-decoder"), "--taps", "new"), "coords"),
        (("--component", NAME, "--inputs", "missing", "--taps", "new"), "missing"),
        ((*given(), "--taps", "taken"), "taken: the destination exists already"),
        ((*given(), "--taps", "nowhere/new"), "nowhere"),
    ],
)
def test_refusals(
    objects: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[object, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("mine")
    found = run("--models", objects, *arguments)
    assert found.exit_code == 2, found.output
    assert found.stderr.startswith("error: ")
    assert message in found.stderr.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert Path("taken").read_text() == "mine"

"""`sam3d-run` writes files, and refuses with one sentence and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts import TINY
from typer.testing import CliRunner, Result

from sam3d_gguf.cli.run import app
from sam3d_gguf.runtime.tensor_files import TensorFile

Files = tuple[Path, Path]
IMAGE = ["--image", str(TINY / "input.png"), "--bbox", "52,8.5,141.25,139"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_body(models: Files, *arguments: object) -> Result:
    return run("body", "--model", models[0], "--mhr", models[1], "--threads", 1, *arguments)


def test_body_writes_its_files(model_files: Files, tmp_path: Path) -> None:
    taps = tmp_path / "taps.safetensors"
    out = tmp_path / "out"
    camera = ["--intrinsics", "231.5,226,97.25,78.5", "--inference-type", "body"]
    found = run_body(model_files, *IMAGE, *camera, "--taps", taps, "--out", out)
    assert found.exit_code == 0, found.stderr
    names = {path.name for path in out.iterdir()}
    assert names == {*("result.safetensors", "mesh.glb", "mesh.obj", "overlay.png", "timings.json")}
    with TensorFile(out / "result.safetensors") as file:
        assert file.metadata["intrinsics"] == "given"
        assert json.loads(file.metadata["pred_vertices"])["unit"] == "metre"
        vertices = file.read("pred_vertices")
    with TensorFile(taps) as file, TensorFile(TINY / "expected.safetensors") as expected:
        assert set(file.tensors) == set(expected.tensors)
        wanted = expected.read("09.out.004.pred_vertices")
    np.testing.assert_allclose(vertices[0], wanted, atol=1e-4)
    timings = json.loads((out / "timings.json").read_bytes())
    assert {"load", "read", "body features", "body decoder"} <= set(timings["seconds"])
    again = run_body(model_files, *IMAGE, "--out", out)
    assert again.exit_code == 2
    assert "exists" in again.stderr


def test_features_only(model_files: Files, tmp_path: Path) -> None:
    found = run_body(model_files, *IMAGE, "--features-only", "--out", tmp_path, "--json")
    assert found.exit_code == 0, found.stderr
    assert len(json.loads(found.stdout)["files"]) == 2
    with TensorFile(tmp_path / "result.safetensors") as file:
        assert set(file.tensors) == {"bbox", "pose_token", "pred_cam_t", "cam_int"}
        assert file.metadata["intrinsics"] == "assumed"


def batch(tmp_path: Path, *images: dict[str, Any]) -> Path:
    path = tmp_path / "list.json"
    path.write_text(json.dumps({"schema_version": 1, "images": list(images)}))
    return path


def test_batch_writes_a_folder_a_photo(model_files: Files, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes((TINY / "input.png").read_bytes())
    entry = {"image": "photo.png", "boxes": [[52, 8.5, 141.25, 139]]}
    path = batch(tmp_path, {"name": "a", **entry}, {"name": "b", **entry})
    found = run_body(model_files, "--batch", path, "--out", tmp_path / "out")
    assert found.exit_code == 0, found.stderr
    first, second = ((tmp_path / "out" / name / "result.safetensors").read_bytes() for name in "ab")
    assert first == second


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([{"name": "../x", "image": "a", "boxes": [[0, 0, 1, 1]]}], "name"),
        ([{"name": "x", "image": "a"}], "boxes"),
        ([{"name": "x", "image": "a", "boxes": [[0, 0, 1, 1]]}] * 2, "second"),
        ([{"name": "x", "image": "a", "boxes": [[0, 0, 1, 1]], "masks": ["m", "n"]}], "masks"),
    ],
)
def test_bad_batches_are_refused(
    model_files: Files, tmp_path: Path, images: list[dict[str, Any]], words: str
) -> None:
    found = run_body(model_files, "--batch", batch(tmp_path, *images), "--out", tmp_path)
    assert found.exit_code == 2
    assert words in found.stderr


def test_cases(model_files: Files, tmp_path: Path) -> None:
    taps = tmp_path / "cases.safetensors"
    found = run_body(model_files, "--cases", TINY / "mhr-cases.safetensors", "--taps", taps)
    assert found.exit_code == 0, found.stderr
    with TensorFile(taps) as file, TensorFile(TINY / "mhr-cases.safetensors") as expected:
        assert set(file.tensors) == set(expected.tensors)


@pytest.mark.parametrize("kind", ["json", "npz"])
def test_mhr_parameters_to_meshes(model_files: Files, tmp_path: Path, kind: str) -> None:
    with TensorFile(TINY / "mhr-cases.safetensors") as file:
        identity = file.read("mhr.identity_broadcast.00.in_identity")
        parameters = file.read("mhr.identity_broadcast.01.in_model_params")
        expression = file.read("mhr.identity_broadcast.02.in_expression")
        wanted = file.read("mhr.identity_broadcast.13.vertices")
    path = tmp_path / f"params.{kind}"
    if kind == "npz":
        np.savez(path, identity=identity, model_parameters=parameters, expression=expression)
    else:
        document = {
            "schema_version": 1,
            "identity": identity.tolist(),
            "model_parameters": parameters.tolist(),
            "expression": expression.tolist(),
        }
        path.write_text(json.dumps(document))
    out = tmp_path / "out"
    found = run("mhr", "--mhr", model_files[1], "--params", path, "--out", out)
    assert found.exit_code == 0, found.stderr
    with TensorFile(out / "result.safetensors") as file:
        np.testing.assert_allclose(file.read("vertices"), wanted, atol=4e-4)
    assert {"mesh.glb", "mesh.obj"} <= {entry.name for entry in out.iterdir()}


def test_mhr_parameters_that_do_not_fit(model_files: Files, tmp_path: Path) -> None:
    path = tmp_path / "params.npz"
    arguments = ("mhr", "--mhr", model_files[1], "--params", path, "--out", tmp_path)
    np.savez(path, identity=np.zeros((1, 45)))
    assert run(*arguments).exit_code == 2
    np.savez(path, identity=np.zeros((1, 45)), model_parameters=np.zeros((1, 203)))
    assert run(*arguments).exit_code == 2
    np.savez(path, identity=np.zeros((3, 45)), model_parameters=np.zeros((2, 204)))
    assert run(*arguments).exit_code == 2
    np.savez(path, identity=np.full((1, 45), np.nan), model_parameters=np.zeros((1, 204)))
    assert run(*arguments).exit_code == 2
    path.write_bytes(b"PK")
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "x"], "nothing to run"),
        (IMAGE, "no folder"),
        ([*IMAGE, "--bbox", "1,2,3", "--out", "x"], "four numbers"),
        ([*IMAGE, "--intrinsics", "1,1,nan,1", "--out", "x"], "finite"),
        ([*IMAGE, "--mask", "a", "--mask", "b", "--out", "x"], "2 masks"),
        ([*IMAGE, "--features-only", "--taps", "t", "--out", "x"], "--taps"),
        (["--cases", "c"], "--taps"),
        (["--batch", "b", *IMAGE, "--out", "x"], "stands alone"),
    ],
)
def test_bad_requests_are_refused(
    model_files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_body(model_files, *arguments)
    assert found.exit_code == 2
    assert words in found.stderr
    assert not (tmp_path / "x" / "result.safetensors").exists()


def test_devices_are_listed() -> None:
    found = run("--list-devices", "--json")
    assert found.exit_code == 0, found.stderr
    devices = json.loads(found.stdout)["devices"]
    assert "cpu" in {device["backend"] for device in devices}
    assert all(device["memory_total_bytes"] > 0 for device in devices)

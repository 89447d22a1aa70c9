"""`sam3d-run` writes files, and refuses with one sentence and exit code 2."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts import TINY
from PIL import Image
from typer.testing import CliRunner, Result

from sam3d_gguf.cli.run import app
from sam3d_gguf.runtime.ggml import host_memory
from sam3d_gguf.runtime.tensor_files import TensorFile, write_tensors

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
        assert {"tool", "device", "libraries", "body.content_sha256"} <= file.metadata.keys()


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*IMAGE, "--out", "x", "--inference-type", "hand", "--taps", "t"], "--taps"),
        (["--cases", "c", "--taps", "t", *IMAGE], "--cases stands alone"),
        (["--cases", "c", "--taps", "t", "--out", "x"], "--cases stands alone"),
        ([*IMAGE[:2], "--bbox", "0.1,0.1,0.6,0.9", "--out", "x"], "pixels, not fractions"),
        ([*IMAGE, "--out", "full"], "full/mesh.obj: the destination exists already"),
        ([*IMAGE, "--out", "file/x"], "isn't a folder"),
        ([*IMAGE, "--out", "x", "--taps", "x/mesh.obj"], "two outputs have the same path"),
        ([*IMAGE, "--out", "x", "--taps", "y/../x/mesh.obj"], "two outputs have the same path"),
        ([*IMAGE, "--out", "x", "--taps", "y/t"], "folder doesn't exist"),
        ([*IMAGE, "--out", "x" * 300], "too long"),
        ([*IMAGE, "--out", "x", "--mask", "small.png"], "the mask is 3x2"),
        ([*IMAGE, "--out", "x", "--mask", "none.png"], "No such file"),
    ],
)
def test_requests_that_would_lose_something_are_refused_and_leave_nothing(
    model_files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mesh.obj").write_text("mine")
    (tmp_path / "file").write_text("mine")
    Image.new("L", (3, 2)).save(tmp_path / "small.png")
    before = sorted(tmp_path.rglob("*"))
    found = run_body(model_files, *arguments)
    assert (found.exit_code, found.stderr.count("\n")) == (2, 1), found.stderr
    assert words in found.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_outputs_are_checked_before_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "timings.json").write_text("mine")
    found = run_body((Path("none"), Path("none")), *IMAGE, "--out", tmp_path)
    assert "exists already" in found.stderr
    np.savez(tmp_path / "p.npz", identity=np.zeros((1, 45)), model_parameters=np.zeros((1, 204)))
    more = run("mhr", "--mhr", "none", "--params", tmp_path / "p.npz", "--out", tmp_path)
    assert "exists already" in more.stderr


def test_a_batch_names_the_photo_that_is_refused_and_keeps_those_before(
    model_files: Files, tmp_path: Path
) -> None:
    good = {"image": str(TINY / "input.png"), "boxes": [[52, 8.5, 141.25, 139]]}
    bad = {**good, "name": "b", "boxes": [[500, 500, 600, 600]]}
    path = batch(tmp_path, {**good, "name": "a"}, bad)
    out = tmp_path / "out"
    found = run_body(model_files, "--batch", path, "--out", out, "--inference-type", "body")
    assert found.exit_code == 2
    assert "photo 'b', box 0: the box lies outside the image" in found.stderr
    assert [entry.name for entry in out.iterdir()] == ["a"]
    assert str(out / "a" / "timings.json") in found.stdout
    absent = batch(tmp_path, {**good, "name": "c"}, {**good, "name": "d", "image": "none.png"})
    found = run_body(model_files, "--batch", absent, "--out", out)
    assert "photo 'd', " in found.stderr
    assert [entry.name for entry in out.iterdir()] == ["a"]


def test_warnings_of_the_image_library_are_not_shown(model_files: Files, tmp_path: Path) -> None:
    photo = tmp_path / "p.jpg"
    with Image.open(TINY / "input.png") as image:
        image.convert("RGB").save(photo, exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    arguments = ["--image", photo, "--bbox", "52,8,141,139", "--inference-type", "body"]
    found = run_body(model_files, *arguments, "--out", tmp_path / "out")
    assert (found.exit_code, found.stderr) == (0, "")


def npy(shape: str, data: bytes = b"", descr: str = "<f8") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + data


ROWS = {
    "identity.npy": npy("(1, 45)", bytes(360)),
    "model_parameters.npy": npy("(1, 204)", bytes(1632)),
}


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"identity.npy": npy("(1000000000000, 45)")}, "0 bytes of data for the shape"),
        ({"identity.npy": npy("(-1, 45)")}, "0 bytes of data"),
        ({"identity.npy": npy("(1, 45)", bytes(368))}, "368 bytes of data"),
        ({"identity.npy": npy("(1, 45)", bytes(360), "|O8")}, "type object"),
        ({"identity.npy": npy("(1, 45)", bytes(180), "<U1")}, "type <U1"),
        ({"identity.npy": npy("(0, 45)")}, "no rows"),
        ({"identity.npy": npy("(1, 45)", bytes(720), "<c16")}, "complex"),
        ({"identity.npy": b"\x93NUMPY\1\0\xff\xff{{{"}, "header can't be read"),
        ({"identity.npy": b"\x93NUMPY\7\0"}, "format is unknown"),
        ({"identity.npy": b"abc"}, "header can't be read"),
        ({"identity": ROWS["identity.npy"]}, "two arrays have one name"),
        ({"more.npy": ROWS["identity.npy"]}, "identity, model_parameters and perhaps"),
        ({"identity.npy": npy("(1, 45)", struct.pack("<d", 1e300) * 45)}, "row 0: a number of"),
    ],
)
def test_hostile_arrays_are_refused(
    model_files: Files, tmp_path: Path, members: dict[str, bytes], words: str
) -> None:
    path = tmp_path / "p.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**ROWS, **members}.items():
            archive.writestr(name, data)
    found = run("mhr", "--mhr", model_files[1], "--params", path, "--out", tmp_path / "out")
    assert (found.exit_code, found.stderr.count("\n")) == (2, 1), found.stderr
    assert words in found.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", [8, 6, 60], ids=["method", "flags", "data"])
def test_damaged_archives_are_refused(model_files: Files, tmp_path: Path, place: int) -> None:
    path = tmp_path / "p.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in ROWS.items():
            archive.writestr(name, data)
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 0x61
    if place < 30:
        damaged[damaged.index(b"PK\1\2") + place + 2] ^= 0x61
    path.write_bytes(damaged)
    found = run("mhr", "--mhr", model_files[1], "--params", path, "--out", tmp_path / "out")
    assert found.exit_code == 2
    assert "internal" not in found.stderr


def test_pipes_do_not_hang(model_files: Files, tmp_path: Path) -> None:
    for suffix in ("npz", "json"):
        pipe = tmp_path / f"pipe.{suffix}"
        os.mkfifo(pipe)
        found = run("mhr", "--mhr", model_files[1], "--params", pipe, "--out", tmp_path / "out")
        assert found.exit_code == 2
        assert "regular file" in found.stderr


def test_case_inputs_that_do_not_fit_are_refused(model_files: Files, tmp_path: Path) -> None:
    with TensorFile(TINY / "head-cases.safetensors") as file:
        inputs = {name: file.read(name) for name in file.tensors if ".in_" in name}
    for number, (name, array) in enumerate(inputs.items()):
        case = ".".join(name.split(".")[:2])
        others = {key: value for key, value in inputs.items() if key.startswith(f"{case}.")}
        for kind, changed in (("empty", array[:0]), ("nan", np.full(array.shape, np.nan, "f4"))):
            path = tmp_path / f"{kind}{number}.safetensors"
            write_tensors(path, {**others, name: changed})
            taps = tmp_path / f"{kind}{number}.out"
            found = run_body(model_files, "--cases", path, "--taps", taps)
            assert found.exit_code == 2, name
            assert f"{case}: the inputs do not fit" in found.stderr, name
            assert not taps.exists()
        if number == 5:
            break


def test_masks_larger_than_memory_are_refused(
    model_files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("L", (200, 150)).save(tmp_path / "m.png")
    real = host_memory.available_memory
    monkeypatch.setattr(host_memory, "available_memory", lambda: min(real(), 89_999))
    found = run_body(model_files, *IMAGE, "--mask", tmp_path / "m.png", "--out", tmp_path / "out")
    assert "1 masks need 0 MiB and 0 MiB are free" in found.stderr
    assert found.exit_code == 2

"""`sam3d-run objects` writes files, and refuses with one sentence and exit code 2."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ball_scene
import numpy as np
import pytest
import tiny_objects
from gltf_check import complaints, scene_of
from numpy.typing import NDArray
from objects_facts import TINY_MOGE
from PIL import Image
from typer.testing import CliRunner, Result

from sam3d_gguf.cli.run import app
from sam3d_gguf.convert.objects import convert_objects
from sam3d_gguf.extractors.models import OBJECTS
from sam3d_gguf.runtime.ggml.errors import CancelledError
from sam3d_gguf.runtime.ggml.store import WeightStore
from sam3d_gguf.runtime.images import read_object_mask, read_photo
from sam3d_gguf.runtime.objects.noise import SeededNoise, StoredNoise
from sam3d_gguf.runtime.objects.pipeline import ObjectsOptions, ObjectsPipeline
from sam3d_gguf.runtime.objects.release import ObjectsRelease
from sam3d_gguf.runtime.objects.report import STAGES
from sam3d_gguf.runtime.objects.stages import ScenePoints
from sam3d_gguf.runtime.run.objects_batch import read_pointmap
from sam3d_gguf.runtime.tensor_files import TensorFile, write_tensors
from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import load_file

QUICK = ("--steps-ss", 1, "--steps-slat", 1, "--gaussians", 4)
FILES = ("gaussians.ply", "mesh.glb", "pose.json", "result.safetensors")
BESIDE = ("preview.png", "report.json", "timings.json")


@pytest.fixture(scope="session")
def ball(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photo, two masks and a pointmap."""
    folder = tmp_path_factory.mktemp("ball")
    ball_scene.write(folder)
    return folder


@pytest.fixture
def given(ball: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return Path(shutil.copytree(ball, tmp_path / "given"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["objects", *(str(argument) for argument in arguments)])


def photo(folder: Path) -> list[object]:
    return ["--image", folder / "photo.png", "--mask", folder / "mask.png"]


def with_points(folder: Path) -> list[object]:
    return [*photo(folder), "--pointmap", folder / "points.npy"]


def refused(found: Result, *words: str) -> None:
    assert found.exit_code == 2, found.output
    *_, last = found.stderr.strip().splitlines()
    assert last.startswith("error: ")
    for word in words:
        assert word in last
    assert "Traceback" not in found.stderr


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def tensors(path: Path) -> dict[str, NDArray[Any]]:
    with TensorFile(path) as file:
        return {name: file.read(name) for name in file.tensors}


def vertices_of(path: Path) -> Any:
    plyfile: Any = importlib.import_module("plyfile")  # has no types
    return plyfile.PlyData.read(path)["vertex"]


def check_surfaces(path: Path, wanted: dict[str, int]) -> Any:
    """A .glb file has these meshes, with so many triangles, for the validator and for trimesh."""
    assert complaints(path.read_bytes()) == []
    loaded = scene_of(path.read_bytes())
    assert {name: len(mesh.faces) for name, mesh in loaded.geometry.items()} == wanted
    assert np.isfinite(loaded.bounds).all()
    return loaded


def test_one_object(runnable: Path, ball: Path, tmp_path: Path) -> None:
    out, taps = tmp_path / "out", tmp_path / "taps.safetensors"
    arguments = ["--models", runnable, *with_points(ball), *QUICK, "--seed", 7]
    found = run(*arguments, "--taps", taps, "--out", out)
    assert found.exit_code == 0, found.stderr
    assert names(out) == {*FILES, *BESIDE}
    assert found.stdout.split() == [*(str(out / name) for name in (*FILES, *BESIDE)), str(taps)]
    lines = found.stderr.splitlines()
    assert "ss-flow, 1 step" in lines
    arrays = tensors(out / "result.safetensors")
    with TensorFile(out / "result.safetensors") as file:
        assert json.loads(file.metadata["mesh_vertices"])["unit"] == "object side"
        assert set(arrays) == set(json_fields(file.metadata))
    report: Any = load_file(out / "report.json", schema="objects-report")
    (told,) = report["objects"]
    voxels = len(arrays["coords"])
    assert told["occupancy"]["voxels"] == voxels
    assert told["gaussians"] == 4 * voxels == len(arrays["gaussian_positions"])
    assert told["mesh"] == {
        "vertices": len(arrays["mesh_vertices"]),
        "faces": len(arrays["mesh_faces"]),
    }
    assert told["mask_pixels"] == int((read_object_mask(ball / "mask.png") > 0).sum())
    assert report["pointmap"]["source"] == "supplied"
    assert report["pointmap"]["camera"]["focal_pixels"] == pytest.approx(ball_scene.FOCAL, rel=1e-3)
    assert report["sampling"] == {
        "noise": "seed 7",
        "structure_steps": 1,
        "latent_steps": 1,
        "gaussians": 4,
    }
    assert {stage["status"] for stage in report["stages"]} == {"numerically verified"}
    vertex = vertices_of(out / "gaussians.ply")
    np.testing.assert_array_equal(vertex["x"], arrays["gaussian_positions"][:, 0])
    logits = tensors(taps)["ss-decoder.logits"]
    assert int((logits > 0).sum()) == told["occupancy"]["occupied"]
    assert told["occupancy"]["near_ties"] == int((np.abs(logits) < 1e-3).sum())
    timings: Any = load_file(out / "timings.json", schema="run-timings")
    timed = {stage.within for stage in STAGES.values()}
    left_out = {"depth", "gaussian-decoder-32"}
    assert set(timings["seconds"]) == {"load", "read", "export"} | (timed - left_out)
    assert [stage["name"] for stage in report["stages"]] == [n for n in STAGES if n not in left_out]
    assert timings["device_memory_bytes"]["ss-flow"]["weights"] > 0
    with Image.open(out / "preview.png") as preview:
        assert preview.size == (2 * ball_scene.WIDTH, ball_scene.HEIGHT)
    again = run(*arguments, "--out", tmp_path / "again")
    assert again.exit_code == 0, again.stderr
    for name in (*FILES, "preview.png", "report.json"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    refused(run(*arguments, "--out", out), "exists")


def json_fields(metadata: Any) -> list[str]:
    """The names of the metadata that describe fields."""
    return [name for name, value in metadata.items() if value.startswith("{")]


def test_several_objects_and_their_scene(runnable: Path, ball: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    both = [*with_points(ball), "--mask", ball / "mask-2.png"]
    found = run("--models", runnable, *both, *QUICK, "--out", out, "--json")
    assert found.exit_code == 0, found.stderr
    folders = ("object-1", "object-2")
    own = {f"{folder}/{name}" for folder in folders for name in FILES}
    assert names(out) == {*own, "gaussians.ply", "mesh.glb", *BESIDE}
    assert len(json.loads(found.stdout)["files"]) == len(names(out))
    placed: list[NDArray[Any]] = []
    triangles: dict[str, int] = {}
    for folder in folders:
        pose: Any = load_file(out / folder / "pose.json", schema="objects-pose")
        arrays = tensors(out / folder / "result.safetensors")
        np.testing.assert_array_equal(pose["translation"], arrays["translation"][0])
        triangles[folder] = len(arrays["mesh_faces"])
        loaded = check_surfaces(out / folder / "mesh.glb", {"object": triangles[folder]})
        x, y, z = arrays["mesh_vertices"].T
        np.testing.assert_array_equal(loaded.geometry["object"].vertices.T, [x, z, -y])
        positions = arrays["gaussian_positions"].astype(np.float64)
        matrix = np.array(pose["matrix"])
        placed.append(positions @ matrix[:3, :3].T + matrix[:3, 3])
    check_surfaces(out / "mesh.glb", triangles)
    vertex = vertices_of(out / "gaussians.ply")
    together = np.stack([vertex[axis] for axis in "xyz"], axis=-1)
    np.testing.assert_allclose(together, np.concatenate(placed), atol=1e-4)
    report: Any = load_file(out / "report.json", schema="objects-report")
    assert [each["name"] for each in report["objects"]] == list(folders)


def test_fast_precision_is_not_verified(runnable: Path, ball: Path, tmp_path: Path) -> None:
    arguments = ["--models", runnable, *with_points(ball), *QUICK, "--precision", "fast"]
    found = run(*arguments, "--out", tmp_path / "out")
    assert found.exit_code == 0, found.stderr
    report: Any = load_file(tmp_path / "out" / "report.json", schema="objects-report")
    for stage in report["stages"]:
        assert stage["status"] == "structural only"
        assert "strict-f32" in stage["reason"]


def test_a_photo_alone(runnable: Path, given: Path, tmp_path: Path) -> None:
    for name in ("photo.png", "mask.png"):
        with Image.open(given / name) as image:
            small = image.resize((64, 48), Image.Resampling.NEAREST)
        small.save(given / name)
    out = tmp_path / "out"
    found = run("--models", runnable, *photo(given), *QUICK, "--out", out)
    assert found.exit_code == 0, found.stderr
    report: Any = load_file(out / "report.json", schema="objects-report")
    assert report["pointmap"]["source"] == "estimated"
    assert report["pointmap"]["camera"]["median_error_pixels"] is None
    depth = report["stages"][0]
    assert depth["name"] == "depth"
    assert depth["status"] == "numerically verified"


def batch(folder: Path, *images: dict[str, Any]) -> Path:
    path = folder / "batch.json"
    path.write_text(json.dumps({"schema_version": 1, "images": images}))
    return path


def test_a_batch(runnable: Path, given: Path, tmp_path: Path) -> None:
    entry = {"image": "photo.png", "masks": ["mask.png"], "pointmap": "points.npy"}
    path = batch(
        given,
        {"name": "a", **entry},
        {"name": "b", **entry, "seed": 5, "masks": ["mask-2.png"]},
        {"name": "c", **entry, "masks": ["empty.png"]},
    )
    Image.new("L", (ball_scene.WIDTH, ball_scene.HEIGHT)).save(given / "empty.png")
    out = tmp_path / "out"
    found = run("--models", runnable, "--batch", path, *QUICK, "--seed", 9, "--out", out)
    refused(found, "photo 'c'", "the mask marks nothing")
    assert names(out) == {f"{name}/{file}" for name in "ab" for file in (*FILES, *BESIDE)}
    assert [Path(line).name for line in found.stdout.split()][:1] == ["gaussians.ply"]
    noise = [
        json.loads((out / name / "report.json").read_bytes())["sampling"]["noise"] for name in "ab"
    ]
    assert noise == ["seed 9", "seed 5"]
    alone = run(
        "--models", runnable, *with_points(given), *QUICK, "--seed", 9, "--out", given / "o"
    )
    assert alone.exit_code == 0, alone.stderr
    one, two = (path / "result.safetensors" for path in (out / "a", given / "o"))
    assert one.read_bytes() == two.read_bytes()


def test_a_seed_and_noise_in_a_batch(runnable: Path, given: Path) -> None:
    entry = {"name": "a", "image": "photo.png", "masks": ["mask.png"]}
    path = batch(given, entry, {**entry, "name": "b", "seed": 1, "noise": "noise.safetensors"})
    found = run("--models", runnable, "--batch", path, "--out", given / "out")
    refused(found, "batch.json#/images/1: seed and noise; expected one of them")


def test_the_object_is_named_where_there_are_several(
    runnable: Path, given: Path, tmp_path: Path
) -> None:
    npy(no_point_in_the_corner)(given)
    corner = np.zeros((ball_scene.HEIGHT, ball_scene.WIDTH), np.uint8)
    corner[:40, :40] = 255
    Image.fromarray(corner).save(given / "corner.png")
    both = ["--mask", given / "corner.png", "--out", tmp_path / "out"]
    found = run("--models", runnable, *with_points(given), *QUICK, *both)
    refused(found, "object 2: the pointmap has no finite point where the mask is set")


def test_stored_noise(runnable: Path, ball: Path, tmp_path: Path) -> None:
    arguments = ["--models", runnable, *with_points(ball), *QUICK]
    taps = tmp_path / "taps.safetensors"
    first = run(*arguments, "--out", tmp_path / "seeded", "--taps", taps)
    assert first.exit_code == 0, first.stderr
    wanted = tensors(tmp_path / "seeded" / "result.safetensors")
    latent = SeededNoise(42).latent((1, len(wanted["coords"]), 8))
    np.testing.assert_array_equal(tensors(taps)["slat_noise"], latent)
    second = run(*arguments, "--noise", taps, "--out", tmp_path / "stored")
    assert second.exit_code == 0, second.stderr
    found = tensors(tmp_path / "stored" / "result.safetensors")
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({}, "the tensor slat_noise is missing"),
        ({"slat_noise": np.zeros((1, 3, 8))}, "slat_noise is float64"),
        ({"slat_noise": np.full((1, 3, 8), np.nan, np.float32)}, "not finite"),
        ({"slat_noise_2": np.zeros((1, 3, 8), np.float32)}, "slat_noise is missing"),
        (
            {"slat_noise": np.zeros((1, 3, 8), np.float32)},
            "ss_noise.6drotation_normalized is missing",
        ),
    ],
)
def test_noise_that_is_refused(
    stored: dict[str, NDArray[Any]], message: str, runnable: Path, ball: Path, tmp_path: Path
) -> None:
    write_tensors(tmp_path / "noise.safetensors", stored)
    noise = ["--noise", tmp_path / "noise.safetensors", "--out", tmp_path / "out"]
    refused(run("--models", runnable, *with_points(ball), *QUICK, *noise), message)


def test_paths_that_are_not_utf8(runnable: Path, ball: Path, tmp_path: Path) -> None:
    odd = tmp_path / "\udcff"
    shutil.copytree(ball, odd)
    for path in odd.iterdir():
        path.rename(odd / f"\udcff-{path.name}")
    inputs = {name: odd / f"\udcff-{name}" for name in ("photo.png", "mask.png", "points.npy")}
    arguments: list[object] = ["--models", runnable, *QUICK, "--image", inputs["photo.png"]]
    arguments += ["--mask", inputs["mask.png"], "--pointmap", inputs["points.npy"]]
    taps = odd / "\udcff.safetensors"
    seeded = run(*arguments, "--out", odd / "seeded", "--taps", taps)
    assert seeded.exit_code == 0, seeded.stderr
    stored = run(*arguments, "--out", odd / "stored", "--noise", taps, "--json")
    assert stored.exit_code == 0, stored.stderr
    report: Any = load_file(odd / "stored" / "report.json", schema="objects-report")
    assert report["sampling"]["noise"] == "the file \ufffd.safetensors"
    two = run(*arguments, "--mask", odd / "\udcff-mask-2.png", "--out", odd / "two")
    assert two.exit_code == 0, two.stderr
    assert {f"object-{number}/pose.json" for number in (1, 2)} < names(odd / "two")


def test_noise_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    header = (
        b'{"slat_noise":{"dtype":"F32","shape":[1,1000000000,8],"data_offsets":[0,32000000000]}}'
    )
    path = tmp_path / "noise.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 32_000_000_000)
    with pytest.raises(InputError, match="slat_noise has 8000000000 numbers"):
        StoredNoise.read(path)


def png(change: Callable[[Image.Image], Image.Image], name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        with Image.open(folder / name) as image:
            changed = change(image)
        changed.save(folder / name)

    return edit


def npy(change: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        np.save(folder / "points.npy", change(np.load(folder / "points.npy")))

    return edit


def transparent(image: Image.Image) -> Image.Image:
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def one_pixel(image: Image.Image) -> Image.Image:
    marked = Image.new("L", image.size)
    marked.putpixel((100, 200), 255)
    return marked


def one_nan(points: NDArray[Any]) -> NDArray[Any]:
    points[5, 7, 1] = np.nan
    return points


def no_point_in_the_corner(points: NDArray[Any]) -> NDArray[Any]:
    points[:10, :10] = np.inf
    return points


def no_point_on_the_object(points: NDArray[Any]) -> NDArray[Any]:
    points[20:80, 20:80] = np.inf
    return points


def header(text: str) -> Callable[[Path], None]:
    """A pointmap whose header has this shape, and no data."""

    def edit(folder: Path) -> None:
        words = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {text}, }}".encode()
        length = len(words).to_bytes(2, "little")
        (folder / "points.npy").write_bytes(b"\x93NUMPY\x01\x00" + length + words)

    return edit


def junk(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes(b"\x93NUMPY\x01\x00\xff\xff")

    return edit


BAD_INPUTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "mask of another size": (
        png(lambda image: image.resize((100, 100)), "mask.png"),
        ("the mask is 100x100", "480x360"),
    ),
    "empty mask": (
        png(lambda image: Image.new("L", image.size), "mask.png"),
        ("the mask marks nothing",),
    ),
    "mask of everything": (
        png(lambda image: Image.new("L", image.size, 255), "mask.png"),
        ("the mask marks everything",),
    ),
    "mask of a pixel": (png(one_pixel, "mask.png"), ("the mask marks 1x1 pixels",)),
    "mask that is no image": (junk("mask.png"), ("mask.png", "can't be read as an image")),
    "transparent photo": (
        png(transparent, "photo.png"),
        ("photo.png", "the photo has transparent pixels"),
    ),
    "pointmap with NaN": (npy(one_nan), ("points.npy", "NaN", "row 5, column 7")),
    "pointmap without the object": (
        npy(no_point_on_the_object),
        ("no finite point where the mask is set",),
    ),
    "pointmap without points": (
        npy(lambda points: np.full_like(points, np.inf)),
        ("points.npy", "no finite point"),
    ),
    "pointmap by planes": (
        npy(lambda points: np.moveaxis(points, -1, 0)),
        ("points.npy", "float32 [3, 90, 120]", "[360, 480, 3]"),
    ),
    "pointmap of depths": (npy(lambda points: points[..., 2]), ("float32 [90, 120]",)),
    "pointmap of another shape": (
        npy(lambda points: points[:, :90]),
        ("the pointmap is 90x90, the photo 480x360",),
    ),
    "pointmap of whole numbers": (npy(lambda points: points.view(np.int32)), ("int32",)),
    "pointmap of objects": (
        lambda folder: np.save(folder / "points.npy", np.array([{}]), allow_pickle=True),
        ("points.npy",),
    ),
    "pointmap that is none": (junk("points.npy"), ("points.npy", "header can't be read")),
    "pointmap of x right, y down": (
        npy(lambda points: points * np.array([-1, -1, 1], np.float32)),
        ("no camera sees", "x left, y up, z forward"),
    ),
    "pointmap behind the camera": (npy(lambda points: -points), ("no camera sees",)),
    "pointmap of one place": (
        npy(lambda points: np.ones_like(points)),
        ("no camera sees",),
    ),
    "pointmap of nothing": (npy(lambda points: points * np.float32(1e-22)), ("extent is",)),
    "pointmap of truth values": (header("(True, True, 3)"), ("for the shape [True, True, 3]",)),
    "pointmap of many axes": (header(f"({'0, ' * 200})"), ("bytes of data",)),
    "pointmap of a vast axis": (header(f"(0, {10**21}, 3)"), ("bytes of data",)),
    "pointmap nested too deep": (header("-" * 9000 + "1"), ("header can't be read",)),
    "pointmap of a long header": (header("(" + "9" * 4000 + ",)"), ("...", "bytes of data")),
    "pointmap cut short": (
        lambda folder: (folder / "points.npy").write_bytes(
            (folder / "points.npy").read_bytes()[:-5]
        ),
        ("points.npy", "bytes of data"),
    ),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_inputs(case: str, runnable: Path, given: Path, tmp_path: Path) -> None:
    edit, words = BAD_INPUTS[case]
    edit(given)
    out = tmp_path / "out"
    refused(run("--models", runnable, *with_points(given), *QUICK, "--out", out), *words)
    assert not out.exists()


def test_a_mask_is_no_jpeg(runnable: Path, given: Path, tmp_path: Path) -> None:
    with Image.open(given / "mask.png") as mask:
        mask.save(given / "mask.jpg")
    arguments = ["--image", given / "photo.png", "--mask", given / "mask.jpg"]
    points = ["--pointmap", given / "points.npy"]
    refused(run("--models", runnable, *arguments, *points, "--out", tmp_path / "o"), "PNG")


@pytest.mark.parametrize(
    ("left_out", "added", "words"),
    [
        ("--image", [], ("nothing to run",)),
        ("--mask", [], ("nothing to run",)),
        ("--out", [], ("no folder",)),
        ("", ["--seed", -1], ("the seed is -1",)),
        ("", ["--seed", 2**64], ("the seed is",)),
        ("", ["--steps-ss", 0], ("flow of ss_generator: the number of steps is 0", "1 to 1000")),
        ("", ["--steps-slat", 1001], ("flow of slat_generator: the number of steps is 1001",)),
        ("", ["--noise", "missing.safetensors"], ("missing.safetensors",)),
        ("", ["--noise", "missing.safetensors", "--seed", 1], ("one of them",)),
        ("", ["--batch", "list.json"], ("--batch stands alone",)),
        ("", ["--mask", "missing.png"], ("missing.png",)),
        ("", ["--gaussians", 5], ()),
    ],
)
def test_options_that_are_refused(
    left_out: str, added: list[object], words: tuple[str, ...], runnable: Path, given: Path
) -> None:
    options: dict[str, object] = {
        "--models": runnable,
        "--image": given / "photo.png",
        "--mask": given / "mask.png",
        "--pointmap": given / "points.npy",
        "--out": given / "out",
    }
    options.pop(left_out, None)
    found = run(*(each for item in options.items() for each in item), *added)
    assert found.exit_code == 2
    for word in words:
        assert word in found.stderr
    assert not (given / "out").exists()


def test_missing_parts(runnable: Path, given: Path) -> None:
    models = Path(shutil.copytree(runnable, given / "models"))
    (models / "ss_decoder.gguf").unlink()
    (models / "slat_generator.gguf").unlink()
    found = run("--models", models, *with_points(given), "--out", given / "out")
    refused(found, "there is no slat_generator.gguf, ss_decoder.gguf")
    (models / "moge.gguf").unlink()
    refused(run("--models", models, *photo(given), "--out", given / "o"), "moge.gguf")
    refused(run("--models", given / "none", *with_points(given), "--out", given / "o"), "no folder")


def test_parts_of_two_releases(runnable: Path, objects: Path, given: Path) -> None:
    models = Path(shutil.copytree(runnable, given / "models"))
    shutil.copy(objects / "slat_decoder_mesh.gguf", models)
    found = run("--models", models, *with_points(given), "--out", given / "out")
    refused(found, "the parts are of two releases", "slat_decoder_mesh")
    shutil.copy(objects / "ss_decoder.gguf", models / "slat_decoder_mesh.gguf")
    found = run("--models", models, *with_points(given), "--out", given / "out")
    refused(found, "slat_decoder_mesh.gguf", "the file is objects.ss_decoder")


def test_a_part_that_was_converted_alone(runnable: Path, given: Path) -> None:
    """It names none of those beside it; the depth model needs not, which may come alone."""
    for name, moge in (("ss_generator", None), ("moge", TINY_MOGE / "model.pt")):
        alone = given / f"{name}-alone"
        convert_objects(tiny_objects.request(alone, parts=(name,), moge=moge))
        models = Path(shutil.copytree(runnable, given / f"models-{name}"))
        shutil.copy(alone / f"{name}.gguf", models)
        if name == "moge":
            ObjectsRelease.open(models, OBJECTS).close()
            continue
        found = run("--models", models, *with_points(given), "--out", given / "out")
        refused(
            found, "ss_generator.gguf does not name slat_decoder_mesh", "Convert all parts at once"
        )


def test_a_mesh_decoder_of_another_grid(objects: Path, ball: Path, tmp_path: Path) -> None:
    found = run("--models", objects, *with_points(ball), "--out", tmp_path / "out")
    refused(found, "slat_decoder_mesh.gguf", "its voxel grid has the side 16", "64")


def test_an_interrupt_leaves_nothing(runnable: Path, ball: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["objects", "--models", runnable, *with_points(ball), "--out", out]
    command = [str(Path(sys.executable).parent / "sam3d-run"), *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        while not run.stderr.readline().startswith("ss-flow"):
            assert run.poll() is None
        run.send_signal(signal.SIGINT)
        output, errors = run.communicate(timeout=120)
    assert run.returncode == 2, errors
    assert output == ""
    assert "interrupted; nothing unfinished was left behind" in errors
    assert not out.exists()


class CancelsAt:
    """Cancels a pipeline at the first step of a stage."""

    def __init__(self, stage: str, pipeline: ObjectsPipeline) -> None:
        self._wanted, self._pipeline = stage, pipeline
        self.stages: list[str] = []
        self.steps = 0

    def stage(self, name: str, steps: int) -> None:
        self.stages.append(name)
        assert steps > 0

    def step(self) -> None:
        if self.stages[-1] == self._wanted:
            self.steps += 1
            self._pipeline.cancel()


def test_cancelling_ends_at_the_next_step(runnable: Path, ball: Path) -> None:
    pixels = read_photo(ball / "photo.png")
    mask = read_object_mask(ball / "mask.png")
    points = ScenePoints(read_pointmap(ball / "points.npy", pixels), None, estimated=False)
    options = ObjectsOptions(structure_steps=3, gaussians=4, mesh=False)
    with ObjectsPipeline.load(runnable, options, threads=1) as pipeline:
        progress = CancelsAt("ss-flow", pipeline)
        with pytest.raises(CancelledError, match="'ss-flow'"):
            pipeline(pixels, [mask], [SeededNoise(0)], points, progress=progress)
        assert progress.stages == ["preprocess", "embed-ss", "ss-flow"]
        assert progress.steps == 1
        with pytest.raises(InputError, match="65 masks"):
            pipeline(pixels, [mask] * 65, [SeededNoise(0)] * 65, points)


def test_one_network_at_a_time(runnable: Path, ball: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages free their weights, so that memory is that of the largest."""
    open_stores: list[int] = []
    most: list[int] = []
    opened, closed = WeightStore.__init__, WeightStore.close

    def count_open(self: WeightStore, *arguments: Any, **options: Any) -> None:
        opened(self, *arguments, **options)
        open_stores.append(id(self))
        most.append(len(open_stores))

    def count_close(self: WeightStore) -> None:
        if id(self) in open_stores:
            open_stores.remove(id(self))
        closed(self)

    monkeypatch.setattr(WeightStore, "__init__", count_open)
    monkeypatch.setattr(WeightStore, "close", count_close)
    pixels = read_photo(ball / "photo.png")
    points = ScenePoints(read_pointmap(ball / "points.npy", pixels), None, estimated=False)
    options = ObjectsOptions(structure_steps=1, latent_steps=1, gaussians=4)
    for resident, wanted in ((False, 1), (True, 7)):
        most.clear()
        with ObjectsPipeline.load(runnable, options, threads=1, resident=resident) as pipeline:
            mask = read_object_mask(ball / "mask.png")
            pipeline(pixels, [mask], [SeededNoise(0)], points)
        assert max(most) == wanted
        assert not open_stores


def test_the_alpha_or_the_brightness_is_the_mask(tmp_path: Path) -> None:
    dark = np.zeros((4, 5), np.uint8)
    dark[1, 2] = 1
    wanted = np.where(dark > 0, 255, 0)
    colored = np.zeros((4, 5, 4), np.uint8)
    colored[..., 0], colored[..., 3] = 255, dark
    opaque = np.full((4, 5, 4), 255, np.uint8)
    opaque[..., :3] = 0
    opaque[1, 2, 0] = 9
    for name, array in {"grey": dark, "alpha": colored, "opaque": opaque}.items():
        Image.fromarray(array).save(tmp_path / f"{name}.png")
        np.testing.assert_array_equal(read_object_mask(tmp_path / f"{name}.png"), wanted)


def test_masks_of_16_bits(tmp_path: Path) -> None:
    wide = np.zeros((4, 5), np.uint16)
    wide[1, 2] = 7
    Image.fromarray(wide).save(tmp_path / "m.png")
    np.testing.assert_array_equal(read_object_mask(tmp_path / "m.png") > 0, wide > 0)


def test_points_that_lie_elsewhere_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = ball_scene.scene(48, 36)
    np.save(tmp_path / "right.npy", found.points)
    np.save(tmp_path / "turned.npy", found.points * np.array([1, -1, 1], np.float32))
    read_pointmap(tmp_path / "right.npy", found.photo)
    assert not caplog.records
    read_pointmap(tmp_path / "turned.npy", found.photo)
    (record,) = caplog.records
    assert "turned.npy" in record.getMessage()
    assert "x left, y up, z forward" in record.getMessage()


def test_taps_in_the_place_of_the_folder(runnable: Path, ball: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = run("--models", runnable, *with_points(ball), *QUICK, "--out", out, "--taps", out)
    refused(found, "two outputs have the same path")
    assert "preprocess" not in found.stderr


def test_a_call_that_lacks_something_is_refused(runnable: Path, ball: Path) -> None:
    pixels, mask = read_photo(ball / "photo.png"), read_object_mask(ball / "mask.png")
    with ObjectsPipeline.load(runnable, threads=1) as pipeline:
        assert not pipeline.verified
        with pytest.raises(InputError, match="load with depth=True"):
            pipeline(pixels, [mask], [SeededNoise(0)])
        path: Any = str(ball / "photo.png")
        with pytest.raises(InputError, match="the photo is str"):
            pipeline(path, [mask], [SeededNoise(0)])
        with pytest.raises(InputError, match="noise for 2 objects"):
            pipeline(pixels, [mask], [SeededNoise(0)] * 2)
        points: Any = np.zeros((3, 4, 4), np.float32)
        with pytest.raises(InputError, match=r"the points are ndarray \[\]"):
            pipeline(pixels, [mask], [SeededNoise(0)], points)
        turned = ScenePoints(np.zeros((4, 4, 3), np.float32), None, estimated=False)
        with pytest.raises(InputError, match=r"the points are ScenePoints \[4, 4, 3\]"):
            pipeline(pixels, [mask], [SeededNoise(0)], turned)
        somewhere = ScenePoints(np.ones((3, 4, 4), np.float32), None, estimated=False)
        others: list[Any] = [mask[0], mask.astype(np.float32), mask[..., None]]
        for bad in others:
            with pytest.raises(InputError, match="expected uint8 or bool"):
                pipeline(pixels, [bad], [SeededNoise(0)], somewhere)
    half: Any = 2.5
    for refusal in (
        lambda: ObjectsOptions(gaussians=half),
        lambda: SeededNoise(half),
        lambda: ObjectsPipeline.load(runnable, ObjectsOptions(structure_steps=half)),
    ):
        with pytest.raises(InputError, match=r"2\.5"):
            refusal()


def test_pointmaps_of_the_photos_shape(tmp_path: Path) -> None:
    photo = np.zeros((361, 479, 3), np.uint8)
    for rows, columns in ((361, 479), (180, 239), (181, 240), (722, 958)):
        points = ball_scene.scene(columns, rows).points
        points[..., 2] = 2
        points[0, 0] = np.inf
        np.save(tmp_path / "p.npy", points)
        found = read_pointmap(tmp_path / "p.npy", photo)
        assert found.shape == (3, 361, 479)
        assert np.isnan(found[:, 0, 0]).all()
        assert found[2, -1, -1] == 2

"""The official shape, from legacy files to verified GGUF: sizes as published, values as PyTorch's."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import facts
import gguf
import numpy as np
import numpy.typing as npt
import pytest
from native_reader import read_native
from oracle_program import (
    FULL_SHAPE,
    Expected,
    expected_tensors,
    full_shape_body,
    full_shape_mhr,
    run_oracle,
)
from safetensors import safe_open

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

BACKBONE = "backbone.encoder."


def run(command: str, *arguments: str | Path) -> None:
    """Run one of the commands; it must succeed."""
    subprocess.run([Path(sys.executable).parent / command, *arguments], check=True)


def convert(layout: str, out: Path, *options: str | Path) -> None:
    """Convert the generated files."""
    source = ("--checkpoint", full_shape_body(), "--mhr", full_shape_mhr(), "--allow-unpinned")
    run("sam3d-convert", "body", *source, "--layout", layout, "--out", out, *options)


def sha256(values: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()


def sha256_as(values: npt.NDArray[Any], source: Expected) -> str:
    """SHA-256 of the values in the source's dtype, if they were narrowed from I64."""
    return sha256(values.astype(np.int64) if source.dtype == "I64" else values)


@pytest.fixture(scope="module")
def body() -> dict[str, Expected]:
    """What PyTorch reads from the checkpoint."""
    path = full_shape_body()
    return expected_tensors(run_oracle("load_checkpoint.py", path))[path.name]


@pytest.fixture(scope="module")
def mhr() -> dict[str, Expected]:
    """What PyTorch reads from the MHR archive, by the names in GGUF."""
    path = full_shape_mhr()
    asset = expected_tensors(run_oracle("load_checkpoint.py", path))[path.name]
    return {row[0]: asset[row[3]] for row in facts.rows("mhr-native.txt")}


@pytest.fixture(scope="module")
def components() -> Generator[Path]:
    """A folder with `release` and `safetensors`, removed afterwards."""
    FULL_SHAPE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FULL_SHAPE) as folder:
        out = Path(folder)
        convert("components", out / "release", "--keep-safetensors", out / "safetensors")
        yield out


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [("backbone", 3_363_078_840, 552), ("other", 451_167_984, 576)],
)
def test_safetensors(
    components: Path, body: dict[str, Expected], name: str, size: int, count: int
) -> None:
    path = components / "safetensors" / f"{name}.safetensors"
    prefix = BACKBONE if name == "backbone" else ""
    assert path.stat().st_size == size
    opened: Any = safe_open(path, framework="numpy")
    with opened as file:
        found: dict[str, str] = {key: sha256(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118
    assert len(found) == count
    if name == "backbone":
        assert found.pop("mask_token") == sha256(np.zeros([1, 1280], np.float32))
    assert found == {
        key.removeprefix(prefix): tensor.f32_sha256 or tensor.sha256
        for key, tensor in body.items()
        if key.startswith(BACKBONE) is (name == "backbone")
    }


def test_backbone_component(components: Path, body: dict[str, Expected]) -> None:
    path = components / "release" / "body-dinov3-backbone.gguf"
    file = read_native(path)
    assert (path.stat().st_size, len(file.tensors)) == (3_363_058_592, 552)
    assert file.metadata.keys() == facts.native_metadata()["body.dinov3_backbone"].keys()
    assert not file.read("mask_token").any()
    for name in file.tensors.keys() - {"mask_token"}:
        assert sha256(file.read(name)) == body[BACKBONE + name].f32_sha256, name


@pytest.mark.parametrize(
    ("component", "size", "count"),
    [("body.pose_branch", 231_353_792, 316), ("mhr.lod1", 693_111_264, 18)],
)
def test_other_components(
    components: Path,
    body: dict[str, Expected],
    mhr: dict[str, Expected],
    component: str,
    size: int,
    count: int,
) -> None:
    path = components / "release" / f"{component.replace('.', '-').replace('_', '-')}.gguf"
    source = mhr if component == "mhr.lod1" else body
    file = read_native(path)
    assert (path.stat().st_size, len(file.tensors)) == (size, count)
    assert file.metadata.keys() == facts.native_metadata()[component].keys()
    for name in file.tensors:
        assert sha256_as(file.read(name), source[name]) == source[name].sha256, name


def test_the_components_verify(components: Path) -> None:
    run("sam3d-verify", components / "release" / "manifest.json")


def test_single_files(body: dict[str, Expected], mhr: dict[str, Expected]) -> None:
    with tempfile.TemporaryDirectory(dir=FULL_SHAPE) as folder:
        out = Path(folder)
        convert("single", out / "body.gguf")
        for path, source in ((out / "body.gguf", body), (out / "mhr.gguf", mhr)):
            tensors = gguf.GGUFReader(path).tensors
            assert {str(tensor.name) for tensor in tensors} == source.keys()
            for tensor in tensors:
                expected = source[str(tensor.name)]
                assert sha256_as(tensor.data, expected) == expected.sha256, tensor.name
        run("sam3d-verify", out / "manifest.json")

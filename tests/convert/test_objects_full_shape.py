"""SAM 3D Objects at the official shape, from legacy files to verified GGUF: values as PyTorch's.

It generates 12.5 GB of checkpoints once, in `.cache/full-shape/objects/`, and needs as much again.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from objects_facts import PARTS
from oracle_program import FULL_SHAPE, Expected, expected_tensors, full_shape_objects, run_oracle

from benchmarks.measure import Measurement
from benchmarks.measure import run as measured

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

LONG = {
    "flow.": "_base_models.generator.reverse_fn.backbone.",
    "cond.": "_base_models.condition_embedder.",
}


def run(command: str, *arguments: str | Path) -> None:
    """Run one of the commands; it must succeed."""
    subprocess.run([Path(sys.executable).parent / command, *arguments], check=True)


@pytest.fixture(scope="module")
def converted() -> Generator[tuple[Path, Measurement]]:
    """A release of all parts, removed afterwards, and what it took."""
    source = full_shape_objects()
    with tempfile.TemporaryDirectory(dir=FULL_SHAPE) as folder:
        out = Path(folder) / "objects"
        command = Path(sys.executable).parent / "sam3d-convert"
        options = ("--checkpoint-dir", source, "--out", out, "--allow-unpinned")
        yield out, measured([command, "objects", *options])


@pytest.fixture
def release(converted: tuple[Path, Measurement]) -> Path:
    """The release."""
    return converted[0]


def test_memory(converted: tuple[Path, Measurement]) -> None:
    assert converted[1].peak_resident_bytes < 1 << 30


def in_source_order(
    name: str, values: np.ndarray[Any, Any], source: Expected
) -> np.ndarray[Any, Any]:
    """The values as the checkpoint has them."""
    if source.shape[2:] == (3, 3, 3) or name.endswith(".module_list.2.pos_embed"):
        return np.moveaxis(values, 2, 1)
    return values


@pytest.mark.parametrize("name", PARTS)
def test_every_tensor(release: Path, name: str) -> None:
    document = run_oracle("load_checkpoint.py", full_shape_objects() / f"{name}.ckpt")
    expected = expected_tensors(document)[f"{name}.ckpt"]
    found: set[str] = set()
    for tensor in gguf.GGUFReader(release / f"{name}.gguf").tensors:
        tensor_name = str(tensor.name)
        for short, long in LONG.items():
            if tensor_name.startswith(short):
                tensor_name = long + tensor_name.removeprefix(short)
        values = in_source_order(tensor_name, tensor.data, expected[tensor_name])
        digest = hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()
        assert digest == expected[tensor_name].sha256, tensor_name
        found.add(tensor_name)
    left_out = {"_base_models.decoder."}
    if name == "slat_generator":  # whose two image encoders are equal in the generated file
        left_out.add("_base_models.condition_embedder.module_list.1.backbone.")
    assert found == {n for n in expected if not n.startswith(tuple(left_out))}


def test_the_release_verifies(release: Path) -> None:
    sources = [f"--source={full_shape_objects() / name}.ckpt" for name in PARTS]
    run("sam3d-verify", release / "manifest.json", *sources)

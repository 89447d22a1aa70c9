"""Run the programs of tests/oracle/ in the environment that `just oracle` makes."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".oracle" / "bin" / "python"
FULL_SHAPE = ROOT / ".cache" / "full-shape"


@dataclass(frozen=True, slots=True)
class Expected:
    """What PyTorch reads of one tensor: safetensors dtype name, shape, SHA-256 of the C-order
    little-endian bytes, and of those after widening to F32 (BF16 and F16 only)."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    f32_sha256: str | None


def run_oracle(program: str, *arguments: str | Path) -> str:
    """Standard output of tests/oracle/PROGRAM."""
    if not PYTHON.exists():
        pytest.fail("there is no oracle environment: `just oracle` makes it")
    command = [PYTHON, ROOT / "tests" / "oracle" / program, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def expected_tensors(document: str) -> dict[str, dict[str, Expected]]:
    """By file and tensor name, from what load_checkpoint.py printed."""
    files: dict[str, dict[str, dict[str, Any]]] = json.loads(document)
    return {
        file: {
            name: Expected(row["dtype"], tuple(row["shape"]), row["sha256"], row.get("f32_sha256"))
            for name, row in tensors.items()
        }
        for file, tensors in files.items()
    }


def full_shape_body() -> Path:
    """A checkpoint of the official shape, its configuration beside it; generated once."""
    return _generated("model.ckpt", "make_full_body.py")


def full_shape_mhr() -> Path:
    """A TorchScript MHR archive of the official shape; generated once."""
    return _generated("mhr_model.pt", "make_full_mhr.py")


def full_shape_objects() -> Path:
    """A folder of checkpoints of SAM 3D Objects of the official shape; generated once."""
    folder = FULL_SHAPE / "objects"
    if not (folder / "slat_decoder_mesh.ckpt").exists():
        run_oracle("make_full_objects.py", "--out", folder)
    return folder


def _generated(name: str, program: str) -> Path:
    path = FULL_SHAPE / name
    if not path.exists():
        run_oracle(program, "--out", FULL_SHAPE)
    return path

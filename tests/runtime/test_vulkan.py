"""Body and Objects on Vulkan from their own intermediates: the fixtures' own rules, or the CPU's result.

Each run is a process of its own: Mesa's llvmpipe, which needs no GPU, does not survive that one
model's buffers are freed before another model computes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ball_scene
import numpy as np
import pytest
from facts import TINY

from sam3d_gguf.runtime.ggml.library import VULKAN_MODULE, load_library
from sam3d_gguf.runtime.parity import Limits, Rules, compare
from sam3d_gguf.runtime.tensor_files import TensorFile

pytestmark = pytest.mark.skipif(
    not (load_library().directory / VULKAN_MODULE).exists(), reason="just setup-vulkan did not run"
)

PHOTO = ("--image", TINY / "input.png", "--bbox", "52,8.5,141.25,139")
CAMERA = ("--intrinsics", "231.5,226,97.25,78.5")


def run_body(models: tuple[Path, Path], *arguments: str | Path) -> None:
    model, mhr = models
    run_model("body", "--backend", "vulkan", "--model", model, "--mhr", mhr, *arguments)


def run_model(*arguments: str | Path) -> None:
    program = "from sam3d_gguf.cli.run import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={"GGML_VK_VISIBLE_DEVICES": "0", **os.environ},
        timeout=600,
    )
    assert run.returncode == 0, run.stderr


def judge(taps: Path, reference: str, rules: Rules, limits: Limits) -> None:
    report = compare([TINY / reference], taps, rules, limits=limits)
    assert [(verdict.name, verdict.reason) for verdict in report.failed] == []
    assert report.passed


@pytest.mark.parametrize(
    ("kind", "reference", "limits"),
    [
        ("body", "expected.safetensors", "plain"),
        ("full", "expected-full.safetensors", "free-running"),
    ],
)
def test_a_photo(
    model_files: tuple[Path, Path],
    rules: Rules,
    tmp_path: Path,
    kind: str,
    reference: str,
    limits: Limits,
) -> None:
    taps = tmp_path / "taps.safetensors"
    outputs = ("--taps", taps, "--out", tmp_path / "out")
    run_body(model_files, *PHOTO, *CAMERA, "--inference-type", kind, *outputs)
    judge(taps, reference, rules, limits)


@pytest.mark.parametrize("cases", ["head-cases.safetensors", "mhr-cases.safetensors"])
def test_single_components(
    model_files: tuple[Path, Path], rules: Rules, tmp_path: Path, cases: str
) -> None:
    taps = tmp_path / "taps.safetensors"
    run_body(model_files, "--cases", TINY / cases, "--taps", taps)
    judge(taps, cases, rules, "plain")


def test_a_photo_and_a_mask_become_what_they_become_on_the_cpu(
    runnable: Path, tmp_path: Path
) -> None:
    ball_scene.write(tmp_path)
    photo = ("--image", tmp_path / "photo.png", "--mask", tmp_path / "mask.png")
    for backend in ("cpu", "vulkan"):
        few = ("--steps-ss", "1", "--steps-slat", "1", "--backend", backend)
        run_model("objects", "--models", runnable, *photo, *few, "--out", tmp_path / backend)
    with (
        TensorFile(tmp_path / "cpu" / "result.safetensors") as on_cpu,
        TensorFile(tmp_path / "vulkan" / "result.safetensors") as on_vulkan,
    ):
        assert list(on_vulkan.tensors) == list(on_cpu.tensors)
        assert "mesh_faces" in on_cpu.tensors
        for name in on_cpu.tensors:
            reference, found = on_cpu.read(name), on_vulkan.read(name)
            np.testing.assert_allclose(
                found, reference, rtol=0, atol=1e-4 * np.abs(reference).max()
            )

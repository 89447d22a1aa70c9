"""The whole estimator on Vulkan, from its own intermediates, under the fixtures' own rules.

Each run is a process of its own: Mesa's llvmpipe, which needs no GPU, does not survive that one
model's buffers are freed before another model computes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from facts import TINY

from sam3d_gguf.runtime.ggml.library import VULKAN_MODULE, load_library
from sam3d_gguf.runtime.parity import Limits, Rules, compare

pytestmark = pytest.mark.skipif(
    not (load_library().directory / VULKAN_MODULE).exists(), reason="just setup-vulkan did not run"
)

PHOTO = ("--image", TINY / "input.png", "--bbox", "52,8.5,141.25,139")
CAMERA = ("--intrinsics", "231.5,226,97.25,78.5")


def run_body(models: tuple[Path, Path], *arguments: str | Path) -> None:
    program = "from sam3d_gguf.cli.run import main; main()"
    model, mhr = models
    command: list[str | Path] = [sys.executable, "-c", program, "body", "--backend", "vulkan"]
    run = subprocess.run(
        [*command, "--model", model, "--mhr", mhr, *arguments],
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

"""Every neural stage of SAM 3D Objects equals the original's, under the fixtures' own rules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from objects_capture import COMPONENTS, capture
from objects_parity import Captured
from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType]

from sam3d_gguf.runtime.ggml.backend import open_backend
from sam3d_gguf.runtime.ggml.library import VULKAN_MODULE, load_library

NOT_NEURAL = {
    "ss-decoder": "coords$|coords_pruned|downsample_factor|ball",
    "gaussian-decoder-32": r"gaussian\.|ply\.",
    "gaussian-decoder-4": r"gaussian\.|ply\.",
    "mesh-decoder": r"mesh\.",
    "depth": r"positions\.|fit\.",
}
"""Tensors of the fixtures that are not stages of the networks."""


@pytest.fixture(name="models")
def _models(request: pytest.FixtureRequest, component: str) -> Path:
    folder: Path = request.getfixturevalue("depth" if component == "depth" else "objects")
    return folder


def failures(component: str, captured: Captured) -> list[str]:
    return captured.failures(component, left_out=NOT_NEURAL.get(component, "$^"))


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_on_the_cpu(models: Path, component: str) -> None:
    with open_backend(load_library(), "cpu", threads=2) as backend:
        captured, nodes = capture(component, backend, models)
    assert failures(component, captured) == []
    assert {node.buffer for node in nodes} <= {"CPU", ""}
    assert {node.backend for node in nodes} <= {"CPU", "BLAS"}


@pytest.mark.skipif(
    not (load_library().directory / VULKAN_MODULE).exists(), reason="just setup-vulkan did not run"
)
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_on_vulkan(models: Path, tmp_path: Path, component: str) -> None:
    out = tmp_path / "vulkan.safetensors"
    program = Path(__file__).parents[1] / "objects_capture.py"
    run = subprocess.run(
        [sys.executable, program, component, "vulkan", models, out],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={"GGML_VK_VISIBLE_DEVICES": "0", **os.environ},
        timeout=1800,
    )
    assert run.stdout.split() == ["Vulkan0"]
    captured = Captured()
    captured.found = load_file(out)
    assert failures(component, captured) == []

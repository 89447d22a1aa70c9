"""Every component of SAM 3D Objects equals the original's, under the fixtures' own rules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from objects_capture import COMPONENTS, DEPTH, WITHOUT_NETWORKS, capture
from objects_components import Component, Tensors, read

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.library import VULKAN_MODULE, load_library

NETWORKS = [name for name in COMPONENTS if name not in WITHOUT_NETWORKS]


@pytest.fixture(name="models")
def _models(request: pytest.FixtureRequest, component: str) -> Path:
    folder: Path = request.getfixturevalue("depth" if component == DEPTH else "objects")
    return folder


def failures(component: str, tensors: Tensors) -> list[str]:
    others = r"positions\.|fit\." if component == DEPTH else "$^"
    return Component.load(component).failures(tensors, left_out=others)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_on_the_cpu(backend: Backend, models: Path, component: str) -> None:
    tensors, nodes = capture(component, backend, models)
    assert failures(component, tensors) == []
    assert bool(nodes) == (component in NETWORKS)
    assert {node.buffer for node in nodes} <= {"CPU", ""}
    assert {node.backend for node in nodes} <= {"CPU", "BLAS"}


@pytest.mark.skipif(
    not (load_library().directory / VULKAN_MODULE).exists(), reason="just setup-vulkan did not run"
)
@pytest.mark.parametrize("component", NETWORKS)
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
    assert failures(component, read(out)) == []

"""The tensors of a component of the tiny SAM 3D Objects, and the nodes of the graphs that ran.

As a program: `objects_capture.py COMPONENT BACKEND MODELS OUT.safetensors`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from pathlib import Path
from unittest.mock import patch

import numpy as np
from objects_components import Component, Tensors

from sam3d_gguf.runtime.ggml.backend import Backend, BackendName, open_backend
from sam3d_gguf.runtime.ggml.graph import Graphs, Node
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects.components import NAMES, models_of, run_component
from sam3d_gguf.runtime.objects.components.captures import Recorder, without_prefix
from sam3d_gguf.runtime.objects.neural_depth import DepthModel
from sam3d_gguf.runtime.objects.release import ObjectsRelease
from sam3d_gguf.runtime.tensor_files import write_tensors

DEPTH = "depth"
COMPONENTS = (*NAMES, DEPTH)
WITHOUT_NETWORKS = ("preprocess", "pose-decoder", "mesh-extract")


def capture(component: str, backend: Backend, models: Path) -> tuple[Tensors, list[Node]]:
    """A component's tensors from its fixture's inputs, and the nodes of all graphs that ran."""
    fixture = Component.load(component)
    with _nodes() as nodes:
        if component == DEPTH:
            found = _depth(backend, models, fixture.inputs)
            # The model tells of more stages than the fixture has.
            names = {name[4:]: name for name in fixture.expected}
            return {names[stage]: found[stage] for stage in found if stage in names}, nodes
        with ObjectsRelease.open(models, models_of(component)) as release:
            return run_component(component, release, backend, fixture.inputs), nodes


@contextlib.contextmanager
def _nodes() -> Generator[list[Node]]:
    """The nodes of all graphs, which are known until the graphs are freed."""
    found: list[Node] = []
    close = Graphs.close

    def keep(graphs: Graphs) -> None:
        found.extend(node for graph in graphs.all() for node in graph.nodes())
        close(graphs)

    with patch.object(Graphs, "close", keep):
        yield found


def _depth(backend: Backend, models: Path, inputs: Tensors) -> Tensors:
    """The points of every photo, and one's stages, by stage."""
    found: Tensors = {}
    with (
        load_weights(models / "moge.gguf", "objects.moge") as weights,
        DepthModel(backend, weights) as model,
    ):
        for name, photo in without_prefix("photo", inputs).items():
            recorder = Recorder()
            estimate = model.estimate(photo, taps=recorder if name == "landscape" else None)
            found |= {f"{name}.{stage}": array for stage, array in recorder.found.items()}
            points = np.where(estimate.mask[..., None], estimate.points, np.float32(0))
            found[f"{name}.points"] = points
            found[f"{name}.mask"] = estimate.mask.astype(np.uint8)
            found[f"{name}.intrinsics"] = estimate.intrinsics
    return found


def main() -> None:
    """Write the tensors; print the names of the buffers that they were computed in."""
    component, name, models, out = sys.argv[1:]
    backend: BackendName = "vulkan" if name == "vulkan" else "cpu"
    with open_backend(load_library(), backend) as opened:
        tensors, nodes = capture(component, opened, Path(models))
    write_tensors(Path(out), tensors)
    print(*sorted({node.buffer for node in nodes}))


if __name__ == "__main__":
    main()

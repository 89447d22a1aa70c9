"""The networks of SAM 3D Objects in the product, as a program that answers timed requests (`serve`).

python -m benchmarks.product_objects FILES COMPONENT [--threads N]

FILES is a folder with the converted parts. A flow's condition tokens, and the tables of its voxels, are
prepared once, as for the steps of a sampling; a decoder's tables are part of its time.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from benchmarks import serve
from benchmarks.objects_inputs import COMPONENTS, SS_LATENTS, TIME, inputs
from sam3d_gguf.extractors.models import ObjectsModel, part
from sam3d_gguf.runtime.ggml.backend import Backend, open_backend
from sam3d_gguf.runtime.ggml.graph import IndexArray
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.ggml.network import DeviceModel
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects.gaussians import GaussianSettings, gaussians
from sam3d_gguf.runtime.objects.mesh import extract_mesh
from sam3d_gguf.runtime.objects.mesh_cubes import MeshSettings
from sam3d_gguf.runtime.objects.neural_slat_decoders import (
    GaussianDecoder,
    MeshDecoder,
    MeshTables,
)
from sam3d_gguf.runtime.objects.neural_slat_flow import FlowTables, StructuredLatentFlow
from sam3d_gguf.runtime.objects.neural_ss_decoder import SparseStructureDecoder
from sam3d_gguf.runtime.objects.neural_ss_flow import SparseStructureFlow
from sam3d_gguf.runtime.objects.voxels import (
    Windows,
    downsampling,
    neighbours,
    subdivided,
    windows,
)
from sam3d_gguf.runtime.weights import Weights

MODELS: dict[str, ObjectsModel] = {
    "ss_flow": "objects.ss_generator",
    "slat_flow": "objects.slat_generator",
    "ss_decoder": "objects.ss_decoder",
    "gaussian_32": "objects.slat_decoder_gs",
    "gaussian_4": "objects.slat_decoder_gs_4",
    "mesh": "objects.slat_decoder_mesh",
}
Loaded = tuple[DeviceModel, serve.Task]


def ss_flow(backend: Backend, weights: Weights, given: serve.Arrays) -> Loaded:
    """One velocity of the sparse structure."""
    flow = SparseStructureFlow(backend, weights)
    flow.prepare(given["tokens"])
    latents = {name: given[name] for name in SS_LATENTS}
    return flow, lambda: {**flow.velocity(latents, TIME)}


def slat_flow(backend: Backend, weights: Weights, given: serve.Arrays) -> Loaded:
    """One velocity of the structured latents."""
    flow = StructuredLatentFlow(backend, weights)
    coords = given["coords"]
    cubes = downsampling(coords)
    flow.prepare(given["tokens"], FlowTables(neighbours(coords), cubes, neighbours(cubes.coords)))
    return flow, lambda: {**flow.velocity({"feats": given["feats"]}, TIME)}


def ss_decoder(backend: Backend, weights: Weights, given: serve.Arrays) -> Loaded:
    """Occupancy."""
    decoder = SparseStructureDecoder(backend, weights)
    return decoder, lambda: {"logits": decoder.logits(given["latent"])}


def both_windows(coords: IndexArray, size: int) -> tuple[Windows, Windows]:
    """Those of even and of odd blocks."""
    return windows(coords, size, 0), windows(coords, size, size // 2)


def gaussian(backend: Backend, weights: Weights, given: serve.Arrays) -> Loaded:
    """The Gaussians of all voxels."""
    decoder = GaussianDecoder(backend, weights)
    settings, perturbation = GaussianSettings.of(weights), weights.array("offset_perturbation")
    coords, feats = given["coords"], given["feats"]

    def task() -> serve.Arrays:
        raw = decoder.raw(feats, coords, both_windows(coords, decoder.window_size))
        found = gaussians(coords, raw, perturbation, settings)
        return {
            "positions": found.places,
            "features": found.features,
            "scales": found.raw_scales,
            "rotations": found.raw_rotations,
            "opacities": found.raw_opacities,
        }

    return decoder, task


def mesh(backend: Backend, weights: Weights, given: serve.Arrays) -> Loaded:
    """The features of all cubes, and the surface."""
    decoder, settings = MeshDecoder(backend, weights), MeshSettings.of(weights)
    coords, feats = given["coords"], given["feats"]

    def task() -> serve.Arrays:
        once = subdivided(coords)
        twice = subdivided(once)
        around = both_windows(coords, decoder.window_size)
        tables = MeshTables(around, (neighbours(once), neighbours(twice)))
        features = decoder.features(feats, coords, tables)
        surface = extract_mesh(twice, features, settings)
        return {
            "distances": features[:, :8] + np.float32(settings.bias),
            "values": features[:, 8:],
            "vertex_count": np.array([float(len(surface.vertices))]),
        }

    return decoder, task


LOADERS = {
    "ss_flow": ss_flow,
    "slat_flow": slat_flow,
    "ss_decoder": ss_decoder,
    "gaussian_32": gaussian,
    "gaussian_4": gaussian,
    "mesh": mesh,
}


def main() -> None:
    """Load, then answer requests."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("files", type=Path)
    parser.add_argument("component", choices=COMPONENTS)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    component: str = options.component
    model = MODELS[component]
    started = time.perf_counter()
    with (
        open_backend(load_library(), "cpu", threads=options.threads) as backend,
        load_weights(options.files / f"{part(model)}.gguf", model) as weights,
    ):
        network, task = LOADERS[component](backend, weights, inputs(component))
        with network:
            accelerator = backend.accelerator
            facts = {
                "load_seconds": time.perf_counter() - started,
                "accelerator": None if accelerator is None else accelerator.name,
                "kernels": accelerator is not None and accelerator.kernels is not None,
                "libraries": {file.path.name: file.sha256 for file in backend.files},
            }
            serve.serve({component: task}, facts)


if __name__ == "__main__":
    main()

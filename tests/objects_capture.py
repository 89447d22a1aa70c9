"""The stages of each neural component of the tiny SAM 3D Objects, from its fixture's inputs.

As a program: `objects_capture.py COMPONENT BACKEND MODELS OUT.safetensors`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
from objects_parity import Array, Arrays, Captured, inputs_of
from objects_voxels import Grouped, flow_tables, neighbours, subdivided, windows
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from sam3d_gguf.extractors.models import ObjectsModel, part
from sam3d_gguf.runtime.ggml.backend import Backend, BackendName, open_backend
from sam3d_gguf.runtime.ggml.graph import IndexArray, Node
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.ggml.network import DeviceModel
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects.neural_depth import DepthModel
from sam3d_gguf.runtime.objects.neural_embed import ConditionEmbedder
from sam3d_gguf.runtime.objects.neural_slat_decoders import (
    GaussianDecoder,
    MeshDecoder,
    MeshTables,
)
from sam3d_gguf.runtime.objects.neural_slat_flow import StructuredLatentFlow
from sam3d_gguf.runtime.objects.neural_ss_decoder import SparseStructureDecoder
from sam3d_gguf.runtime.objects.neural_ss_flow import SparseStructureFlow
from sam3d_gguf.runtime.weights import Weights

Model = Callable[[Backend, Weights], DeviceModel]


def prefixed(inputs: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin with a prefix, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in inputs.items()
        if name.startswith(prefix)
    }


def guided(conditional: Arrays, unconditional: Arrays, strength: float) -> Arrays:
    """Classifier-free guidance."""
    factors = np.float32(1 + strength), np.float32(strength)
    return {
        name: factors[0] * array - factors[1] * unconditional[name]
        for name, array in conditional.items()
    }


def both_windows(coords: IndexArray) -> tuple[Grouped, Grouped]:
    """The windows of even and of odd blocks."""
    return windows(coords, 8, 0), windows(coords, 8, 4)


def mesh_tables(coords: IndexArray) -> MeshTables:
    """What the mesh decoder needs of its voxels."""
    once = subdivided(coords)
    return MeshTables(both_windows(coords), (neighbours(once), neighbours(subdivided(once))))


def thinned(name: str, array: Array) -> Array:
    """Every 16th token of a shape, as the fixtures have it."""
    return array[:, ::16] if array.shape[1] == 4096 else array


def embed(network: DeviceModel, given: Arrays, captured: Captured) -> None:
    """The condition tokens."""
    assert isinstance(network, ConditionEmbedder)
    inputs = {name: given[name] for name in network.inputs}
    captured("tokens", network.tokens(inputs, taps=captured))
    for call in ("", ".call1"):
        blocks = captured.found.get(f"module_list.2.block0{call}")
        if blocks is not None:
            captured(f"module_list.2.block0_first8windows{call}", blocks[:8])


def ss_flow_forward(flow: DeviceModel, given: Arrays, captured: Captured) -> None:
    """Velocities of the sparse structure."""
    assert isinstance(flow, SparseStructureFlow)
    latents = prefixed(given, "latents.")
    flow.prepare(given["cond_tokens"])
    forward = flow.velocity(latents, float(given["t"][0]), taps=captured)
    captured("d_embedder.d0", captured.found["d_embedder"])
    uncond = flow.velocity(latents, 437.5, conditional=False)
    captured.found = {name: thinned(name, each) for name, each in captured.found.items()}
    for name, array in forward.items():
        captured(f"velocity_cond.{name}", array)
    velocities = {
        "uncond": uncond,
        "cond_d250": flow.velocity(latents, 437.5, 250.0),
        "cfg_t437p5": guided(forward, uncond, 7),
        "cfg_t500p5": flow.velocity(latents, 500.5),
    }
    for case, velocity in velocities.items():
        for name, array in velocity.items():
            captured(f"velocity_{case}.{name}", thinned(name, array))


def ss_flow_sampler(flow: DeviceModel, given: Arrays, captured: Captured) -> None:
    """The sparse structure, sampled by the pipeline's steps and by those of a distilled model."""
    assert isinstance(flow, SparseStructureFlow)
    flow.prepare(given["cond_tokens"])
    for case, noise, steps, d, strength in (
        ("pipeline25", "noise.", 25, 0.0, 7.0),
        ("distilled4", "noise_distilled.", 4, 0.25, 0.0),
    ):
        even = np.arange(steps + 1, dtype=np.float32) / np.float32(steps)
        times: Array = even / (1 + 2 * (1 - even))
        captured(f"{case}.t_seq", times)
        captured(f"{case}.d", np.array([d], np.float32))
        latents = prefixed(given, noise)
        for number, (time, after) in enumerate(pairwise(times.tolist()), 1):
            velocity = flow.velocity(latents, 1000 * time, 1000 * d)
            if strength and 1000 * time <= 500:
                uncond = flow.velocity(latents, 1000 * time, 1000 * d, conditional=False)
                velocity = guided(velocity, uncond, strength)
            step = np.float32(after - time)
            latents = {name: x + step * velocity[name] for name, x in latents.items()}
            for name, array in latents.items():
                if number == steps:
                    captured(f"{case}.final.{name}", array)
                else:
                    captured(f"{case}.step{number:02d}.{name}", thinned(name, array))


def ss_decoder(decoder: DeviceModel, given: Arrays, captured: Captured) -> None:
    """Occupancy, and which voxels are occupied."""
    assert isinstance(decoder, SparseStructureDecoder)
    logits = decoder.logits(given["shape_latent"], taps=captured)
    found = captured.found
    for name in ("input_layer", "middle_block"):
        found[name] = found[name][:, ::4]
    for number in range(8):
        captured(f"block{number}_corner8", found[f"block{number}"][:, :, :8, :8, :8])
    captured("logits_stride2", logits[None, None, ::2, ::2, ::2])
    occupied = np.argwhere(logits > 0).astype(np.int32)
    captured("coords_original", np.pad(occupied, ((0, 0), (1, 0))))


def slat_flow_forward(flow: DeviceModel, given: Arrays, captured: Captured) -> None:
    """Velocities of the structured latents."""
    assert isinstance(flow, StructuredLatentFlow)
    tables = flow_tables(given["coords"])
    flow.prepare(given["cond_tokens"], tables)
    x, time = {"feats": given["x"]}, float(given["t"])
    cond = flow.velocity(x, time, taps=captured)
    uncond = flow.velocity(x, time, conditional=False)
    at_500 = flow.velocity(x, 500.0)
    uncond_at_500 = flow.velocity(x, 500.0, conditional=False)
    for name in ("blocks.0.self_attn", "blocks.0.cross_attn", "blocks.0", "blocks.1"):
        captured.found[name] = captured.found[name][0]
    captured("input_blocks.last.downsample.coords", tables.cubes.coords)
    captured("velocity_cond", cond["feats"])
    captured("velocity_uncond", uncond["feats"])
    captured("velocity_cfg_t312p5", guided(cond, uncond, 1)["feats"])
    captured("velocity_cfg_t500", guided(at_500, uncond_at_500, 1)["feats"])
    captured("velocity_cfg_t520", flow.velocity(x, 520.0)["feats"])


def slat_flow_sampler(flow: DeviceModel, given: Arrays, captured: Captured) -> None:
    """The structured latents, sampled by the pipeline's steps."""
    assert isinstance(flow, StructuredLatentFlow)
    flow.prepare(given["cond_tokens"], flow_tables(given["coords"]))
    times = np.arange(26, dtype=np.float32) / np.float32(25)
    captured("t_seq", times)
    latent = {"feats": given["noise"]}
    for number, (time, after) in enumerate(pairwise(times.tolist()), 1):
        velocity = flow.velocity(latent, 1000 * time)
        if 1000 * time <= 500:
            velocity = guided(velocity, flow.velocity(latent, 1000 * time, conditional=False), 1)
        latent = {"feats": latent["feats"] + np.float32(after - time) * velocity["feats"]}
        captured(f"step{number:02d}", latent["feats"])
    denormalised = latent["feats"][0] * given["slat_std"] + given["slat_mean"]
    captured("slat_denormalised.feats", denormalised)


def gaussian_decoder(decoder: DeviceModel, given: Arrays, captured: Captured) -> None:
    """Raw Gaussians."""
    assert isinstance(decoder, GaussianDecoder)
    coords = given["coords"]
    decoder.raw(given["slat_feats"], coords, both_windows(coords), taps=captured)


def mesh_decoder(decoder: DeviceModel, given: Arrays, captured: Captured) -> None:
    """Features of the mesh's cubes."""
    assert isinstance(decoder, MeshDecoder)
    coords = given["coords"]
    features = decoder.features(given["slat_feats"], coords, mesh_tables(coords), taps=captured)
    captured("upsample.1_stride4", captured.found["upsample.1"][::4])
    captured("out_layer_stride8", features[::8])
    captured("out_layer.coords", subdivided(subdivided(coords)))


def depth(model: DeviceModel, given: Arrays, captured: Captured) -> None:
    """The points of every photo, and one's stages."""
    assert isinstance(model, DepthModel)
    for name, photo in prefixed(given, "photo.").items():
        stages = Captured()
        estimate = model.estimate(photo, taps=stages if name == "landscape" else None)
        stages.found |= {
            "points": np.where(estimate.mask[..., None], estimate.points, np.float32(0)),
            "mask": estimate.mask.astype(np.uint8),
            "intrinsics": estimate.intrinsics,
        }
        for stage, array in stages.found.items():
            captured(f"{name}.{stage}", array)


Run = Callable[[DeviceModel, Arrays, Captured], None]
COMPONENTS: Mapping[str, tuple[ObjectsModel, Model, Run]] = {
    "embed-ss": ("objects.ss_generator", ConditionEmbedder, embed),
    "embed-slat": ("objects.slat_generator", ConditionEmbedder, embed),
    "ss-flow-forward": ("objects.ss_generator", SparseStructureFlow, ss_flow_forward),
    "ss-flow-sampler": ("objects.ss_generator", SparseStructureFlow, ss_flow_sampler),
    "ss-decoder": ("objects.ss_decoder", SparseStructureDecoder, ss_decoder),
    "slat-flow-forward": ("objects.slat_generator", StructuredLatentFlow, slat_flow_forward),
    "slat-flow-sampler": ("objects.slat_generator", StructuredLatentFlow, slat_flow_sampler),
    "gaussian-decoder-32": ("objects.slat_decoder_gs", GaussianDecoder, gaussian_decoder),
    "gaussian-decoder-4": ("objects.slat_decoder_gs_4", GaussianDecoder, gaussian_decoder),
    "mesh-decoder": ("objects.slat_decoder_mesh", MeshDecoder, mesh_decoder),
    "depth": ("objects.moge", DepthModel, depth),
}


def capture(component: str, backend: Backend, models: Path) -> tuple[Captured, tuple[Node, ...]]:
    """A component's stages, and the nodes of all graphs that ran."""
    model, network, run = COMPONENTS[component]
    captured = Captured()
    with (
        load_weights(models / f"{part(model)}.gguf", model) as weights,
        network(backend, weights) as opened,
    ):
        run(opened, inputs_of(component), captured)
        nodes = [node for graph in opened.graphs() for node in graph.nodes()]
    return captured, tuple(nodes)


def main() -> None:
    """Write the stages; print the names of the buffers that they were computed in."""
    component, name, models, out = sys.argv[1:]
    backend: BackendName = "vulkan" if name == "vulkan" else "cpu"
    with open_backend(load_library(), backend) as opened:
        captured, nodes = capture(component, opened, Path(models))
    found = {stage: np.ascontiguousarray(array) for stage, array in captured.found.items()}
    save_file(found, Path(out))
    print(*sorted({node.buffer for node in nodes}))


if __name__ == "__main__":
    main()

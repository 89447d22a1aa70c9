"""The sparse structure: its flow, the pose and the occupied voxels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from sam3d_gguf.extractors.models import ObjectsModel
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.objects.components.captures import (
    Captured,
    Recorder,
    decimal,
    prefixed,
    without_prefix,
)
from sam3d_gguf.runtime.objects.components.component import Component
from sam3d_gguf.runtime.objects.components.inputs import (
    Array,
    Arrays,
    Wanted,
    check_range,
    check_voxels,
)
from sam3d_gguf.runtime.objects.metadata import integer
from sam3d_gguf.runtime.objects.neural_ss_decoder import SparseStructureDecoder
from sam3d_gguf.runtime.objects.neural_ss_flow import (
    POSE,
    SHAPE,
    SparseStructureFlow,
    latent_shapes,
)
from sam3d_gguf.runtime.objects.pose import PoseDecoder
from sam3d_gguf.runtime.objects.release import ObjectsRelease
from sam3d_gguf.runtime.objects.sampler import Latent, SamplerSettings, guidance, guided, sample
from sam3d_gguf.runtime.objects.stages import OCCUPANCY, STRUCTURE
from sam3d_gguf.runtime.objects.structure import OccupancySettings, shrunk, structure, surface

_DISTILLED_STEPS = 4
_BEYOND = 0.5
"""Added to the end of the guidance's interval: a time at which there is none."""
_POSES = ("sampler", "case2")
_CORNER = slice(8)
_BLOCKS = 8


def latents_wanted(release: ObjectsRelease, prefix: str) -> dict[str, Wanted]:
    """The tokens of shape and pose."""
    shapes = latent_shapes(release[STRUCTURE])
    return {f"{prefix}.{name}": Wanted(shapes[name]) for name in sorted(shapes)}


def tokens_wanted(release: ObjectsRelease, model: ObjectsModel) -> dict[str, Wanted]:
    """The condition tokens of a generator."""
    return {"cond_tokens": Wanted((1, "L", integer(release[model], "flow.condition_channels")))}


def _forward_wanted(release: ObjectsRelease) -> Mapping[str, Wanted]:
    times = {"t": Wanted((1,)), "d": Wanted((1,))}
    return tokens_wanted(release, STRUCTURE) | times | latents_wanted(release, "latents")


def _forward(release: ObjectsRelease, backend: Backend, inputs: Arrays) -> Captured:
    """The stages of one velocity, and velocities with other tokens, times and steps."""
    weights = release[STRUCTURE]
    settings = SamplerSettings.of(weights)
    time, step = float(inputs["t"][0]), float(inputs["d"][0])
    check_range("t", time, settings.time_scale)
    check_range("d", step, settings.time_scale)
    latents = without_prefix("latents", inputs)
    recorder = Recorder()
    told, beyond = settings.time_scale / _DISTILLED_STEPS, settings.interval[1] + _BEYOND
    with SparseStructureFlow(backend, weights) as flow:
        flow.prepare(inputs["cond_tokens"])
        cond = flow.velocity(latents, time, step, taps=recorder)
        uncond = flow.velocity(latents, time, step, conditional=False)
        guides = settings.guides(time)
        cases: dict[str, Latent] = {
            "uncond": uncond,
            f"cond_d{decimal(told)}": flow.velocity(latents, time, told),
            f"cfg_t{decimal(time)}": guidance(cond, uncond, settings.strength if guides else 0),
            f"cfg_t{decimal(beyond)}": guided(flow.velocity, latents, beyond, step, settings),
        }
    recorder(f"d_embedder.d{decimal(step)}", recorder["d_embedder"])
    names = _forward_stages(sorted(latents), step, integer(weights, "flow.block_count"))
    found: Captured = {name: _thinned(name, recorder[name]) for name in names}
    found |= prefixed("velocity_cond", cond)
    for case, velocity in cases.items():
        found |= _all_thinned(prefixed(f"velocity_{case}", velocity))
    return found


def _forward_stages(latents: list[str], step: float, blocks: int) -> Iterator[str]:
    """The output of every block, and the parts of the first."""
    yield from (f"latent_mapping.{name}.input_layer" for name in latents)
    yield "t_embedder"
    yield f"d_embedder.d{decimal(step)}"
    yield "block0.adaLN_modulation"
    for part, streams in (
        ("self_attn", (SHAPE, POSE)),
        ("cross_attn", (POSE, SHAPE)),
        ("mlp", (POSE, SHAPE)),
    ):
        yield from (f"block0.{part}.{stream}" for stream in streams)
    for block in range(blocks):
        yield from (f"block{block}.{stream}" for stream in (POSE, SHAPE))


def _thinned(name: str, array: Array) -> Array:
    """Every 16th token of a shape."""
    return array[:, ::16] if SHAPE in name.split(".") else array


def _all_thinned(stages: Captured) -> Captured:
    return {name: _thinned(name, array) for name, array in stages.items()}


def _sampler_wanted(release: ObjectsRelease) -> Mapping[str, Wanted]:
    noise = latents_wanted(release, "noise") | latents_wanted(release, "noise_distilled")
    return tokens_wanted(release, STRUCTURE) | noise


def _sampler(release: ObjectsRelease, backend: Backend, inputs: Arrays) -> Captured:
    """The latents after every step, by the pipeline's settings and by a distilled model's."""
    weights = release[STRUCTURE]
    settings = SamplerSettings.of(weights)
    cases = {
        f"pipeline{settings.steps}": (settings, "noise"),
        f"distilled{_DISTILLED_STEPS}": (
            settings.with_steps(_DISTILLED_STEPS).as_distilled(),
            "noise_distilled",
        ),
    }
    found: Captured = {}
    with SparseStructureFlow(backend, weights) as flow:
        flow.prepare(inputs["cond_tokens"])
        for case, (sampling, noise) in cases.items():
            found[f"{case}.t_seq"] = sampling.times().astype(np.float32)
            found[f"{case}.d"] = np.array([sampling.step_size], np.float32)
            states = sample(flow.velocity, without_prefix(noise, inputs), sampling)
            for number, latents in enumerate(states, 1):
                if number == sampling.steps:
                    found |= prefixed(f"{case}.final", latents)
                else:
                    found |= _all_thinned(prefixed(f"{case}.step{number:02d}", latents))
    return found


def _pose_wanted(release: ObjectsRelease) -> Mapping[str, Wanted]:
    scene = {"scene_scale": Wanted((1, 3)), "scene_shift": Wanted((1, 3))}
    for case in _POSES:
        tokens = latents_wanted(release, case)
        del tokens[f"{case}.{SHAPE}"]
        scene |= tokens
    return scene


def _pose(release: ObjectsRelease, backend: Backend, inputs: Arrays) -> Captured:
    """The poses of two sets of tokens in one scene."""
    del backend
    decoder = PoseDecoder.of(release[STRUCTURE])
    found: Captured = {}
    for case in _POSES:
        tokens = without_prefix(case, inputs)
        pose = decoder.decode(tokens, inputs["scene_scale"], inputs["scene_shift"])
        found[f"{case}.translation"] = pose.translation
        found[f"{case}.rotation"] = pose.rotation
        found[f"{case}.scale"] = pose.scale
    return found


def _decoder_wanted(release: ObjectsRelease) -> Mapping[str, Wanted]:
    weights = release[OCCUPANCY]
    tokens = integer(weights, "latent_resolution") ** 3
    return {
        "shape_latent": Wanted((1, tokens, integer(weights, "latent_channels"))),
        "ball": Wanted(("N", 4), "int32"),
        "ball_max_coords": Wanted((1,), "int32"),
    }


def _decoder(release: ObjectsRelease, backend: Backend, inputs: Arrays) -> Captured:
    """Occupancy and the voxels, and what becomes of other voxels, the `ball`."""
    weights = release[OCCUPANCY]
    settings = OccupancySettings.of(weights)
    ball, most = inputs["ball"], int(inputs["ball_max_coords"][0])
    check_voxels("ball", ball, integer(weights, "resolution"))
    recorder = Recorder()
    with SparseStructureDecoder(backend, weights) as decoder:
        logits = decoder.logits(inputs["shape_latent"], taps=recorder)[None, None]
    found: Captured = {name: recorder[name][:, ::4] for name in ("input_layer", "middle_block")}
    for block in range(_BLOCKS):
        corner = recorder[f"block{block}"][:, :, _CORNER, _CORNER, _CORNER]
        found[f"block{block}_corner8"] = corner
    voxels = structure(logits, settings)
    smaller, factor = shrunk(ball, most, settings.downsample_factor)
    return found | {
        "logits_stride2": logits[:, :, ::2, ::2, ::2],
        "coords_original": voxels.occupied,
        "coords_pruned": voxels.surface,
        "coords": voxels.coords,
        "downsample_factor": np.array([voxels.scale_factor], np.int32),
        "ball.pruned": surface(ball, settings.prune_distance),
        "ball.downsampled": smaller,
        "ball.downsample_factor": np.array([factor], np.int32),
    }


FORWARD = Component((STRUCTURE,), _forward_wanted, _forward)
SAMPLER = Component((STRUCTURE,), _sampler_wanted, _sampler)
POSE_DECODER = Component((STRUCTURE,), _pose_wanted, _pose)
STRUCTURE_DECODER = Component((OCCUPANCY,), _decoder_wanted, _decoder)

"""The structured latent: its flow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.objects.components.captures import Captured, Recorder, decimal
from sam3d_gguf.runtime.objects.components.component import Component
from sam3d_gguf.runtime.objects.components.inputs import (
    Arrays,
    Wanted,
    check_range,
    check_voxels,
)
from sam3d_gguf.runtime.objects.components.structure import tokens_wanted
from sam3d_gguf.runtime.objects.latent_tables import flow_tables
from sam3d_gguf.runtime.objects.metadata import integer, numbers
from sam3d_gguf.runtime.objects.neural_slat_flow import FEATURES, StructuredLatentFlow
from sam3d_gguf.runtime.objects.release import ObjectsRelease
from sam3d_gguf.runtime.objects.sampler import Latent, SamplerSettings, guidance, guided, sample
from sam3d_gguf.runtime.objects.stages import LATENT
from sam3d_gguf.schemas.errors import InputError

_BEYOND = 20
"""Added to the end of the guidance's interval: a time at which there is none."""
_ROUNDING = 1e-6


def _wanted(release: ObjectsRelease, latent: str) -> dict[str, Wanted]:
    channels = integer(release[LATENT], "flow.latent_channels")
    return {
        **tokens_wanted(release, LATENT),
        "coords": Wanted(("N", 4), "int32"),
        latent: Wanted((1, "N", channels)),
    }


def _forward_wanted(release: ObjectsRelease) -> Mapping[str, Wanted]:
    return _wanted(release, "x") | {"t": Wanted(())}


def _forward(release: ObjectsRelease, backend: Backend, inputs: Arrays) -> Captured:
    """The stages of one velocity, and velocities with other tokens and times."""
    weights, coords = release[LATENT], inputs["coords"]
    settings = SamplerSettings.of(weights)
    check_voxels("coords", coords, integer(weights, "flow.resolution"))
    time = float(inputs["t"])
    check_range("t", time, settings.time_scale)
    latent = {FEATURES: inputs["x"]}
    recorder, tables = Recorder(), flow_tables(coords)
    end = settings.interval[1]
    with StructuredLatentFlow(backend, weights) as flow:
        flow.prepare(inputs["cond_tokens"], tables)
        cond = flow.velocity(latent, time, taps=recorder)
        uncond = flow.velocity(latent, time, conditional=False)
        guides = settings.guides(time)
        cases: dict[str, Latent] = {
            "cond": cond,
            "uncond": uncond,
            f"cfg_t{decimal(time)}": guidance(cond, uncond, settings.strength if guides else 0),
        }
        for other in (end, end + _BEYOND):
            cases[f"cfg_t{decimal(other)}"] = guided(flow.velocity, latent, other, 0.0, settings)
    recorder("input_blocks.last.downsample.coords", tables.cubes.coords)
    found: Captured = {}
    for name in _forward_stages(integer(weights, "flow.block_count")):
        # The original's sparse tensors have no batch axis.
        found[name] = recorder[name][0] if name.startswith("blocks.") else recorder[name]
    return found | {f"velocity_{case}": moving[FEATURES] for case, moving in cases.items()}


def _forward_stages(blocks: int) -> Iterator[str]:
    """The output of every block, and the parts of the first."""
    yield from ("input_layer", "t_embedder", "input_blocks.0.conv1", "input_blocks.0")
    yield from (f"input_blocks.last.downsample.{part}" for part in ("feats", "coords"))
    yield "input_blocks.1"
    yield from ("blocks.0.self_attn", "blocks.0.cross_attn")
    yield from (f"blocks.{block}" for block in range(blocks))
    yield from ("out_blocks.0", "out_blocks.1")


def _sampler_wanted(release: ObjectsRelease) -> Mapping[str, Wanted]:
    channels = integer(release[LATENT], "flow.latent_channels")
    scale = {"slat_mean": Wanted((channels,)), "slat_std": Wanted((channels,))}
    return _wanted(release, "noise") | scale


def _sampler(release: ObjectsRelease, backend: Backend, inputs: Arrays) -> Captured:
    """The latent after every step, and denormalised."""
    weights, coords = release[LATENT], inputs["coords"]
    settings = SamplerSettings.of(weights)
    check_voxels("coords", coords, integer(weights, "flow.resolution"))
    mean, deviation = (_of_the_model(release, inputs, name) for name in ("mean", "std"))
    latent: Latent = {FEATURES: inputs["noise"]}
    found: Captured = {"t_seq": settings.times().astype(np.float32)}
    with StructuredLatentFlow(backend, weights) as flow:
        flow.prepare(inputs["cond_tokens"], flow_tables(coords))
        states = sample(flow.velocity, latent, settings)
        for number, latent in enumerate(states, 1):
            found[f"step{number:02d}"] = latent[FEATURES]
    return found | {"slat_denormalised.feats": latent[FEATURES][0] * deviation + mean}


def _of_the_model(release: ObjectsRelease, inputs: Arrays, name: str) -> Float32:
    """The model's numbers; another model's may not be given."""
    given = inputs[f"slat_{name}"]
    own = np.array(numbers(release[LATENT], f"latent.{name}", len(given)), np.float32)
    if not np.allclose(given, own, rtol=_ROUNDING, atol=0):
        raise InputError(
            f"the input slat_{name} is {given.tolist()}",
            expected=f"the model's {own.tolist()}",
            action="Give inputs that were captured with this model.",
        )
    return own


FORWARD = Component((LATENT,), _forward_wanted, _forward)
SAMPLER = Component((LATENT,), _sampler_wanted, _sampler)

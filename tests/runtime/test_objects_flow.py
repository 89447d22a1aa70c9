"""The flow transformers of SAM 3D Objects equal the original's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from objects_parity import Arrays, Captured, inputs_of
from objects_voxels import flow_tables

from sam3d_gguf.runtime.ggml.backend import Backend, open_backend
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects.neural_slat_flow import StructuredLatentFlow
from sam3d_gguf.runtime.objects.neural_ss_flow import SparseStructureFlow
from sam3d_gguf.schemas.errors import InputError


@pytest.fixture(name="backend")
def _backend() -> Iterator[Backend]:
    with open_backend(load_library(), "cpu", threads=2) as backend:
        yield backend


@pytest.fixture(name="ss_flow")
def _ss_flow(backend: Backend, objects: Path) -> Iterator[SparseStructureFlow]:
    weights = load_weights(objects / "ss_generator.gguf", "objects.ss_generator")
    with SparseStructureFlow(backend, weights) as flow:
        yield flow


@pytest.fixture(name="slat_flow")
def _slat_flow(backend: Backend, objects: Path) -> Iterator[StructuredLatentFlow]:
    weights = load_weights(objects / "slat_generator.gguf", "objects.slat_generator")
    with StructuredLatentFlow(backend, weights) as flow:
        yield flow


def latents_of(inputs: Arrays, prefix: str) -> Arrays:
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


def test_every_stage_of_the_structure_flow(ss_flow: SparseStructureFlow) -> None:
    given = inputs_of("ss-flow-forward")
    latents = latents_of(given, "latents.")
    captured = Captured()
    ss_flow.prepare(given["cond_tokens"])
    forward = ss_flow.velocity(latents, float(given["t"][0]), taps=captured)
    captured.found["d_embedder.d0"] = captured.found.pop("d_embedder")
    uncond = ss_flow.velocity(latents, 437.5, conditional=False)
    velocities = {
        "uncond": uncond,
        "cond_d250": ss_flow.velocity(latents, 437.5, 250.0),
        "cfg_t437p5": guided(forward, uncond, 7),
        "cfg_t500p5": ss_flow.velocity(latents, 500.5),
    }
    for name, array in captured.found.items():
        if array.shape[1] == 4096:
            captured.found[name] = array[:, ::16]
    for case, velocity in velocities.items():
        for name, array in velocity.items():
            captured(f"velocity_{case}.{name}", array[:, ::16] if name == "shape" else array)
    for name, array in forward.items():
        captured(f"velocity_cond.{name}", array)
    assert captured.failures("ss-flow-forward") == []


@pytest.mark.parametrize(
    ("case", "noise", "distilled", "strength"),
    [("pipeline25", "noise.", False, 7.0), ("distilled4", "noise_distilled.", True, 0.0)],
)
def test_the_structure_sampled(
    ss_flow: SparseStructureFlow, case: str, noise: str, distilled: bool, strength: float
) -> None:
    given = inputs_of("ss-flow-sampler")
    steps = 4 if distilled else 25
    even = np.arange(steps + 1, dtype=np.float32) / np.float32(steps)
    times = even / (1 + 2 * (1 - even))
    step = 0.25 if distilled else 0.0
    ss_flow.prepare(given["cond_tokens"])
    latents = latents_of(given, noise)
    captured = Captured()
    captured(f"{case}.t_seq", times)
    captured(f"{case}.d", np.array([step], np.float32))
    for number, (time, after) in enumerate(pairwise(times.tolist()), 1):
        scaled = 1000 * time
        velocity = ss_flow.velocity(latents, scaled, 1000 * step)
        if strength and scaled <= 500:
            uncond = ss_flow.velocity(latents, scaled, 1000 * step, conditional=False)
            velocity = guided(velocity, uncond, strength)
        latents = {
            name: x + np.float32(after - time) * velocity[name] for name, x in latents.items()
        }
        stage = "final" if number == steps else f"step{number:02d}"
        for name, array in latents.items():
            part = array[:, ::16] if name == "shape" and stage != "final" else array
            captured(f"{case}.{stage}.{name}", part)
    assert captured.failures("ss-flow-sampler", left_out=f"(?!{case})") == []


def test_other_tokens_give_another_velocity_and_the_first_come_back(
    ss_flow: SparseStructureFlow,
) -> None:
    given = inputs_of("ss-flow-forward")
    latents, tokens = latents_of(given, "latents."), given["cond_tokens"]
    found: list[bytes] = []
    for each in (tokens, tokens * 2, tokens[:, :60], tokens):
        ss_flow.prepare(each)
        found.append(ss_flow.velocity(latents, 250.0)["shape"].tobytes())
    assert found[0] == found[3]
    assert len(set(found)) == 3


def test_wrong_latents_and_tokens_are_refused(ss_flow: SparseStructureFlow) -> None:
    given = inputs_of("ss-flow-forward")
    latents = latents_of(given, "latents.")
    with pytest.raises(InputError, match="the flow has no condition tokens"):
        ss_flow.velocity(latents, 1.0)
    for tokens in (given["cond_tokens"][0], given["cond_tokens"][:, :, :32]):
        with pytest.raises(InputError, match="the condition tokens have the shape"):
            ss_flow.prepare(tokens)
    ss_flow.prepare(given["cond_tokens"])
    for wrong in ({**latents, "scale": latents["translation_scale"]}, {"shape": latents["shape"]}):
        with pytest.raises(InputError, match="the latents are"):
            ss_flow.velocity(wrong, 1.0)


def test_every_stage_of_the_latent_flow(slat_flow: StructuredLatentFlow) -> None:
    given = inputs_of("slat-flow-forward")
    tables = flow_tables(given["coords"])
    slat_flow.prepare(given["cond_tokens"], tables)
    x, time = {"feats": given["x"]}, float(given["t"])
    captured = Captured()
    cond = slat_flow.velocity(x, time, taps=captured)
    uncond = slat_flow.velocity(x, time, conditional=False)
    captured("velocity_cond", cond["feats"])
    captured("velocity_uncond", uncond["feats"])
    captured("velocity_cfg_t312p5", guided(cond, uncond, 1)["feats"])
    at_500 = (slat_flow.velocity(x, 500.0), slat_flow.velocity(x, 500.0, conditional=False))
    captured("velocity_cfg_t500", guided(*at_500, 1)["feats"])
    captured("velocity_cfg_t520", slat_flow.velocity(x, 520.0)["feats"])
    captured("input_blocks.last.downsample.coords", tables.cubes.coords)
    for name in ("self_attn", "cross_attn"):
        captured.found[f"blocks.0.{name}"] = captured.found[f"blocks.0.{name}"][0]
    for index in (0, 1):
        captured.found[f"blocks.{index}"] = captured.found[f"blocks.{index}"][0]
    assert captured.failures("slat-flow-forward") == []


def test_the_latent_sampled(slat_flow: StructuredLatentFlow) -> None:
    given = inputs_of("slat-flow-sampler")
    slat_flow.prepare(given["cond_tokens"], flow_tables(given["coords"]))
    times = np.arange(26, dtype=np.float32) / np.float32(25)
    latent = {"feats": given["noise"]}
    captured = Captured()
    captured("t_seq", times)
    for number, (time, after) in enumerate(pairwise(times.tolist()), 1):
        velocity = slat_flow.velocity(latent, 1000 * time)
        if 1000 * time <= 500:
            uncond = slat_flow.velocity(latent, 1000 * time, conditional=False)
            velocity = guided(velocity, uncond, 1)
        latent = {"feats": latent["feats"] + np.float32(after - time) * velocity["feats"]}
        captured(f"step{number:02d}", latent["feats"])
    denormalised = latent["feats"][0] * given["slat_std"] + given["slat_mean"]
    captured("slat_denormalised.feats", denormalised)
    assert captured.failures("slat-flow-sampler") == []


def test_wrong_latents_of_voxels_are_refused(slat_flow: StructuredLatentFlow) -> None:
    given = inputs_of("slat-flow-forward")
    with pytest.raises(InputError, match="the flow has no condition tokens"):
        slat_flow.velocity({"feats": given["x"]}, 1.0)
    slat_flow.prepare(given["cond_tokens"], flow_tables(given["coords"]))
    for latent in ({"feats": given["x"][:, 1:]}, {"shape": given["x"]}, {}):
        with pytest.raises(InputError, match="the latent is"):
            slat_flow.velocity(latent, 1.0)
    with pytest.raises(InputError, match=r"the step 0\.5"):
        slat_flow.velocity({"feats": given["x"]}, 1.0, 0.5)

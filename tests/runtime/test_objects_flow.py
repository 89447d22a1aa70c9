"""The flow transformers of SAM 3D Objects equal the original's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from objects_parity import Arrays, Captured, inputs_of

from sam3d_gguf.runtime.ggml.backend import Backend, open_backend
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.loading import load_weights
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

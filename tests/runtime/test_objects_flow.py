"""The flow transformers of SAM 3D Objects equal the original's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from objects_components import Component

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects.components.captures import without_prefix
from sam3d_gguf.runtime.objects.latent_tables import flow_tables
from sam3d_gguf.runtime.objects.neural_slat_flow import StructuredLatentFlow
from sam3d_gguf.runtime.objects.neural_ss_flow import SparseStructureFlow
from sam3d_gguf.schemas.errors import InputError


@pytest.fixture(name="ss_flow")
def _ss_flow(backend: Backend, objects: Path) -> Iterator[SparseStructureFlow]:
    with (
        load_weights(objects / "ss_generator.gguf", "objects.ss_generator") as weights,
        SparseStructureFlow(backend, weights) as flow,
    ):
        yield flow


@pytest.fixture(name="slat_flow")
def _slat_flow(backend: Backend, objects: Path) -> Iterator[StructuredLatentFlow]:
    with (
        load_weights(objects / "slat_generator.gguf", "objects.slat_generator") as weights,
        StructuredLatentFlow(backend, weights) as flow,
    ):
        yield flow


def test_other_tokens_give_another_velocity_and_the_first_come_back(
    ss_flow: SparseStructureFlow,
) -> None:
    given = Component.load("ss-flow-forward").inputs
    latents, tokens = without_prefix("latents", given), given["cond_tokens"]
    found: list[bytes] = []
    for each in (tokens, tokens * 2, tokens[:, :60], tokens):
        ss_flow.prepare(each)
        found.append(ss_flow.velocity(latents, 250.0)["shape"].tobytes())
    assert found[0] == found[3]
    assert len(set(found)) == 3


def test_wrong_latents_and_tokens_are_refused(ss_flow: SparseStructureFlow) -> None:
    given = Component.load("ss-flow-forward").inputs
    latents = without_prefix("latents", given)
    with pytest.raises(InputError, match="the flow has no condition tokens"):
        ss_flow.velocity(latents, 1.0)
    for tokens in (given["cond_tokens"][0], given["cond_tokens"][:, :, :32]):
        with pytest.raises(InputError, match="the condition tokens have the shape"):
            ss_flow.prepare(tokens)
    ss_flow.prepare(given["cond_tokens"])
    for wrong in ({**latents, "scale": latents["translation_scale"]}, {"shape": latents["shape"]}):
        with pytest.raises(InputError, match="the latents are"):
            ss_flow.velocity(wrong, 1.0)


def test_wrong_latents_of_voxels_are_refused(slat_flow: StructuredLatentFlow) -> None:
    given = Component.load("slat-flow-forward").inputs
    with pytest.raises(InputError, match="the flow has no condition tokens"):
        slat_flow.velocity({"feats": given["x"]}, 1.0)
    slat_flow.prepare(given["cond_tokens"], flow_tables(given["coords"]))
    for latent in ({"feats": given["x"][:, 1:]}, {"shape": given["x"]}, {}):
        with pytest.raises(InputError, match="the latent is"):
            slat_flow.velocity(latent, 1.0)
    with pytest.raises(InputError, match=r"the step 0\.5"):
        slat_flow.velocity({"feats": given["x"]}, 1.0, 0.5)

"""The condition tokens of SAM 3D Objects equal the original's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from objects_components import Component, Tensors

from sam3d_gguf.extractors.models import ObjectsModel, part
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.errors import CancelledError
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects.components.captures import Recorder
from sam3d_gguf.runtime.objects.neural_embed import ConditionEmbedder
from sam3d_gguf.schemas.errors import InputError


def embedder(backend: Backend, objects: Path, model: ObjectsModel) -> ConditionEmbedder:
    with load_weights(objects / f"{part(model)}.gguf", model) as weights:
        return ConditionEmbedder(backend, weights)


def given_to(network: ConditionEmbedder) -> Tensors:
    inputs = Component.load("embed-ss").inputs
    return {name: inputs[name] for name in network.inputs}


def test_tokens_without_taps(backend: Backend, objects: Path) -> None:
    with embedder(backend, objects, "objects.ss_generator") as network:
        given = given_to(network)
        tokens = network.tokens(given)
    np.testing.assert_allclose(tokens, Component.load("embed-ss").expected["022.tokens"], atol=1e-5)


def test_points_that_are_not_finite_take_the_token_for_them(
    backend: Backend, objects: Path
) -> None:
    with embedder(backend, objects, "objects.ss_generator") as network:
        given = given_to(network)
        given["pointmap"][:, :, :14] = np.inf
        captured = Recorder()
        network.tokens(given, taps=captured)
    points = captured.found["module_list.2"][0].reshape(4, 4, -1)
    assert np.isfinite(points).all()
    first = captured.found["module_list.2.block0"].reshape(4, 4, 65, -1)[0]
    np.testing.assert_array_equal(first[0, 0], first[3, 0])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("image", (1, 3, 56, 70), r"image has the shape \(1, 3, 56, 70\)"),
        ("mask", (1, 3, 56, 56), r"mask has the shape"),
        ("pointmap", (1, 3, 56), r"pointmap has the shape"),
        ("depth", (1, 3, 56, 56), "the inputs are"),
    ],
)
def test_wrong_inputs_are_refused(
    backend: Backend, objects: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    with embedder(backend, objects, "objects.ss_generator") as network:
        given = given_to(network)
        with pytest.raises(InputError, match=message):
            network.tokens({**given, name: np.zeros(shape, np.float32)})


def test_a_cancelled_run_ends(backend: Backend, objects: Path) -> None:
    with embedder(backend, objects, "objects.ss_generator") as network:
        given = given_to(network)
        network.cancel()
        with pytest.raises(CancelledError, match=r"before module_list\.0"):
            network.tokens(given)

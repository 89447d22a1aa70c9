"""The depth model beside its stages: sizes of photos, memory, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from objects_components import Component

from sam3d_gguf.runtime.geometry.arrays import Uint8
from sam3d_gguf.runtime.ggml.backend import open_backend
from sam3d_gguf.runtime.ggml.errors import CancelledError
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects import neural_depth, neural_sparse
from sam3d_gguf.runtime.objects.neural_depth import DepthModel, position_weights
from sam3d_gguf.runtime.objects.neural_depth_head import (
    bilinear_corners,
    doubled_numbers,
    neighbourhoods,
    row_numbers,
)
from sam3d_gguf.schemas.errors import ContractError, InputError


@pytest.fixture(name="model", scope="module")
def _model(depth: Path) -> Iterator[DepthModel]:
    with (
        open_backend(load_library(), "cpu", threads=2) as backend,
        load_weights(depth / "moge.gguf", "objects.moge") as weights,
        DepthModel(backend, weights) as opened,
    ):
        yield opened


def photo(height: int, width: int) -> Uint8:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("grid", [(50, 50), (38, 66), (1, 40), (74, 33), (3, 4)])
def test_positions_equal_the_original_s(grid: tuple[int, int]) -> None:
    component = Component.load("depth")
    stored = component.inputs["positions"][0, 1:]
    (name,) = (each for each in component.expected if each.endswith(f".{grid[0]}x{grid[1]}"))
    weights = position_weights(37, grid)
    assert weights is not None
    assert component.failures_of({name: weights @ stored}) == []


def test_a_grid_of_the_stored_size_keeps_the_stored_positions() -> None:
    """As in the original, where interpolation to this grid would change them."""
    component = Component.load("depth")
    (name,) = (each for each in component.expected if each.endswith(".37x37"))
    np.testing.assert_array_equal(component.expected[name], component.inputs["positions"][0, 1:])
    assert position_weights(37, (37, 37)) is None


def test_memory_is_bounded_by_bands_that_change_nothing(
    model: DepthModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Component.load("depth").inputs["photo.landscape"]
    whole = model.estimate(given)
    monkeypatch.setattr(neural_depth, "_BAND", 7 * given.shape[1])
    found = model.estimate(given)
    np.testing.assert_array_equal(found.points, whole.points)
    np.testing.assert_array_equal(found.mask, whole.mask)


def test_convolutions_in_pieces_equal_the_original_s(
    depth: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neural_sparse, "_GATHERED", 9 * 16 * 100)
    given = Component.load("depth").inputs["photo.landscape"]
    with (
        open_backend(load_library(), "cpu", threads=2) as backend,
        load_weights(depth / "moge.gguf", "objects.moge") as weights,
        DepthModel(backend, weights) as model,
    ):
        found = model.estimate(given)
        (output,) = (graph for graph in model.graphs() if graph.name == "output")
        # 41 x 56 pixels in pieces of 14,400 / (9 * 18), made a multiple of 64; and two of 1 x 1.
        products = [node for node in output.nodes() if node.operation == "MUL_MAT"]
    assert len(products) == -(-41 * 56 // 128) + 2
    expected = Component.load("depth").expected
    (name,) = (each for each in expected if each.endswith("landscape.points"))
    points = np.where(found.mask[..., None], found.points, np.float32(0))
    np.testing.assert_allclose(points, expected[name], atol=2e-5)


def test_points_are_infinite_outside_the_mask_only(model: DepthModel) -> None:
    found = model.estimate(photo(20, 30))
    assert found.points.shape == (20, 30, 3) and found.points.dtype == np.float32
    finite = np.isfinite(found.points)
    np.testing.assert_array_equal(finite.all(axis=2), found.mask)
    np.testing.assert_array_equal(finite.any(axis=2), found.mask)
    assert 0 < found.mask.mean() < 1


def test_pixels_and_their_neighbours() -> None:
    around = neighbourhoods(row_numbers((2, 3))).reshape(6, 3, 3)
    assert around[0].tolist() == [[0, 0, 1], [0, 0, 1], [3, 3, 4]]
    assert around[5].tolist() == [[1, 2, 2], [4, 5, 5], [4, 5, 5]]
    assert doubled_numbers((1, 2)).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_corners_of_pixels_between_others() -> None:
    numbers, weights = bilinear_corners((2, 2), (2, 4))
    assert numbers[:, 1].tolist() == [0, 1, 2, 3]
    assert weights[:, 1, 0].tolist() == [0.75, 0.25, 0, 0]
    assert numbers[:, 7].tolist() == [3, 3, 3, 3]
    assert weights[:, 7].sum() == 1


@pytest.mark.parametrize("size", [(4, 200), (200, 4)])
def test_a_photo_narrower_than_a_patch(model: DepthModel, size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=rf"{size[1]}x{size[0]} is too narrow"):
        model.estimate(photo(*size))


def test_a_long_photo(model: DepthModel) -> None:
    assert model.estimate(photo(20, 200)).points.shape == (20, 200, 3)


@pytest.mark.parametrize(
    "given",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros((4, 4, 3), np.float32),
    ],
)
def test_what_is_no_photo(model: DepthModel, given: NDArray[Any]) -> None:
    with pytest.raises(InputError, match="the photo is"):
        model.estimate(given)


def test_a_cancelled_run_ends(model: DepthModel) -> None:
    model.cancel()
    with pytest.raises(CancelledError, match="before encoder"):
        model.estimate(photo(8, 8))


def test_an_encoder_of_too_few_blocks(depth: Path) -> None:
    with (
        open_backend(load_library(), "cpu", threads=2) as backend,
        load_weights(depth / "moge.gguf", "objects.moge") as weights,
    ):
        few = {**weights.metadata, "sam3d.objects.moge.image_encoder.block_count": 3}
        with pytest.raises(ContractError, match="encoder has 3 blocks"):
            DepthModel(backend, dataclasses.replace(weights, metadata=few))

"""Preprocessing equals the original's, and torchvision's resizing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sam3d_gguf.extractors.models import Model, part
from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects import pointmap
from sam3d_gguf.runtime.objects.preprocess import (
    PreprocessSettings,
    crop_around_mask,
    latent_inputs,
    mask_box,
    structure_inputs,
    with_mask,
)
from sam3d_gguf.runtime.objects.resize import bilinear, nearest
from sam3d_gguf.schemas.errors import ContractError, InputError

GENERATORS: tuple[Model, ...] = ("objects.ss_generator", "objects.slat_generator")
SETTINGS = PreprocessSettings(image_size=56, box_size_factor=1.2, padding_factor=0.0)


def ramp(count: int) -> NDArray[np.float32]:
    values = [(index * 37) % 101 / 101 for index in range(count)]
    return np.array(values, np.float32)[None]


def test_bilinear_equals_pytorch_where_it_antialiases_and_at_the_official_size() -> None:
    third = [0.3140028119087219, 0.39312756061553955, 0.5268741250038147]
    np.testing.assert_allclose(bilinear(ramp(7), (1, 3))[0], third, rtol=1e-6)
    fifth = [0, 0.14653466641902924, 0.3663366436958313, 0.5861386656761169, 0.7326732873916626]
    np.testing.assert_allclose(bilinear(ramp(3), (1, 5))[0], fifth, rtol=1e-6)
    large = bilinear(ramp(517), (1, 518))[0, [0, 1, 200, 300, 516, 517]]
    expected = [0, 0.36527583, 0.512588978, 0.688475072, 0.661509871, 0.0297029708]
    np.testing.assert_allclose(large, expected, rtol=1e-6)
    np.testing.assert_array_equal(bilinear(ramp(7).T, (3, 1)), bilinear(ramp(7), (1, 3)).T)


def test_nearest_equals_pytorch() -> None:
    assert nearest(np.arange(7)[None], (1, 5)).tolist() == [[0, 1, 2, 4, 5]]
    assert nearest(np.arange(3)[None], (1, 7)).tolist() == [[0, 0, 0, 1, 1, 2, 2]]


@pytest.mark.parametrize(
    ("corners", "size", "box"),
    [
        ((0, 0, 5, 5), (20, 30), (0, 0, 5, 5)),
        ((3, 4, 9, 9), (12, 10), (3, 3, 9, 9)),
        ((0, 5, 29, 19), (20, 30), (-2, -5, 31, 29)),
    ],
)
def test_boxes_are_the_original_s(
    corners: tuple[int, ...], size: tuple[int, int], box: tuple[int, ...]
) -> None:
    mask = np.zeros(size, np.float32)
    x1, y1, x2, y2 = corners
    mask[y1 : y2 + 1, x1 : x2 + 1] = 0.4
    assert mask_box(mask, 1.2) == box


def test_a_box_beyond_the_photo_is_filled_and_made_square() -> None:
    mask = np.zeros((1, 6, 4), np.float32)
    mask[:, 0:3, 0:4] = 1
    points = np.ones((3, 6, 4), np.float32)
    settings = PreprocessSettings(image_size=8, box_size_factor=1.4, padding_factor=0.3)
    assert mask_box(mask[0], 1.4) == (0, -1, 3, 3)
    crop = crop_around_mask(np.ones((3, 6, 4), np.float32), mask, points, settings)
    outside = np.nan
    assert crop.points is not None
    np.testing.assert_array_equal(
        crop.points[0],
        [
            [outside] * 6,
            [outside, 0, 0, 0, outside, outside],
            *[[outside, 1, 1, 1, outside, outside]] * 3,
            [outside] * 6,
        ],
    )
    assert crop.mask[0].tolist() == [[0] * 6, [0] * 6, *[[0, 1, 1, 1, 0, 0]] * 3, [0] * 6]
    np.testing.assert_array_equal(crop.image[2], crop.mask[0])


@pytest.mark.parametrize("size", [(0, 0), (2, 9), (9, 2)])
def test_a_mask_that_marks_next_to_nothing_is_refused(size: tuple[int, int]) -> None:
    rgba = np.zeros((12, 12, 4), np.uint8)
    rgba[1 : 1 + size[0], 1 : 1 + size[1], 3] = 255
    with pytest.raises(InputError, match="the mask"):
        latent_inputs(rgba, SETTINGS)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.full((3, 5), 255), "the mask is 5x3; expected the photo's 4x3"),
        (np.zeros((3, 4)), "marks nothing"),
        (np.full((3, 4), 1), "marks everything"),
    ],
)
def test_a_mask_that_marks_no_object_is_refused(mask: NDArray[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        with_mask(np.zeros((3, 4, 3), np.uint8), mask.astype(np.uint8))


@pytest.mark.parametrize("mark", [True, np.uint8(1), np.uint8(128), np.uint8(255)])
def test_a_mask_becomes_the_alpha(mark: Any) -> None:
    photo = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
    inside = np.array([[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 0, 1]], np.bool_)
    mask: Any = inside * mark
    merged = with_mask(photo, mask)
    np.testing.assert_array_equal(merged[..., :3], photo)
    np.testing.assert_array_equal(merged[..., 3], np.where(inside, 255, 0))


@pytest.mark.parametrize(
    "points",
    [
        np.zeros((4, 4), np.float32),
        np.zeros((4, 4, 2), np.float32),
        np.zeros((0, 4, 3), np.float32),
        np.zeros((4, 4, 3), np.float64),
    ],
)
def test_what_is_no_pointmap_is_refused(points: NDArray[Any]) -> None:
    with pytest.raises(InputError, match=r"expected float32 \[height, width, 3\]"):
        pointmap.from_file(points, (4, 4))


def test_points_without_a_finite_one_in_the_mask_are_refused() -> None:
    rgba = np.full((12, 12, 4), 255, np.uint8)
    points = pointmap.from_depth_model(np.full((12, 12, 3), np.inf, np.float32))
    with pytest.raises(InputError, match="no finite point where the mask is set"):
        structure_inputs(rgba, points, SETTINGS)


def test_scale_and_shift_are_lower_medians_of_the_scene_and_of_the_mask() -> None:
    points = np.full((3, 1, 6), np.nan, np.float32)
    points[:, 0, :5] = [[1, 2, 3, 4, 90], [0, 0, 0, 0, 0], [5, 5, 6, 6, 6]]
    mask = np.array([[[1, 1, 1, 1, 0.5, 1]]], np.float32)
    scene = pointmap.normalized(points, mask)
    assert scene.shift.tolist() == [2, 0, 5]
    assert scene.scale.tolist() == [1, 1, 1]
    assert scene.points[:, 0, 2].tolist() == [1, 0, 1]
    assert np.isnan(scene.points[:, 0, 5]).all()


def test_points_of_a_file_keep_their_axes_and_take_the_photo_s_size() -> None:
    points = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    taken = pointmap.from_file(points, (4, 2))
    assert taken.shape == (3, 4, 2)
    assert taken[:, :, 0].T.tolist() == [[0, 1, 2], [0, 1, 2], [6, 7, 8], [6, 7, 8]]


def test_settings_are_read_from_the_converted_files(objects: Path) -> None:
    for model in GENERATORS:
        with load_weights(objects / f"{part(model)}.gguf", model) as weights:
            assert PreprocessSettings.of(weights) == SETTINGS
    message = r"sam3d\.objects\.ss_decoder\.image_size"
    with (
        load_weights(objects / "ss_decoder.gguf", "objects.ss_decoder") as weights,
        pytest.raises(ContractError, match=message),
    ):
        PreprocessSettings.of(weights)

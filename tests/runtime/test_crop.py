"""Crops are those of OpenCV 4, pixel by pixel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sam3d_gguf.runtime.body.hands import mirrored
from sam3d_gguf.runtime.geometry.crop import (
    HAND_PADDING,
    MAX_SIDE,
    Crop,
    crop_photo,
    normalize,
    warp_affine,
    warp_affine_float,
    with_aspect,
)
from sam3d_gguf.schemas.errors import InputError

Tensors = dict[str, NDArray[Any]]
SIZE = (128, 128)


def assert_crop(crop: Crop, captured: Tensors, section: str) -> None:
    for number, (name, array) in enumerate(
        [
            ("bbox_xyxy", crop.box),
            ("bbox_center", crop.center),
            ("bbox_scale", crop.scale),
            ("affine_trans", crop.affine),
            ("ori_img_size", crop.photo_size),
            ("img_size", crop.size),
            ("image_u8_hwc", crop.image),
        ]
    ):
        np.testing.assert_array_equal(array, captured[f"{section}.{number:03d}.crop.{name}"])


def test_body_crop_equals_the_capture(expected: Tensors) -> None:
    photo, box = expected["00.input.000.image_u8_rgb_hwc"], expected["00.input.001.bbox_xyxy"]
    crop = crop_photo(photo, box[None], SIZE)
    assert_crop(crop, expected, "01.body")
    other = warp_affine_float(photo, crop.matrix[0], SIZE)
    captured = expected["08.alternative.000.crop_image_u8_hwc_opencv5"][0]
    np.testing.assert_array_equal(other, captured)


def test_hand_crops_equal_the_captures(expected: Tensors, expected_full: Tensors) -> None:
    photo = expected["00.input.000.image_u8_rgb_hwc"]
    left = mirrored(expected_full["11.boxes.000.left_xyxy"], photo.shape[1])
    right = expected_full["11.boxes.001.right_xyxy"]
    flipped = np.ascontiguousarray(photo[:, ::-1])
    assert_crop(crop_photo(flipped, left, SIZE, HAND_PADDING), expected_full, "12.lhand")
    assert_crop(crop_photo(photo, right, SIZE, HAND_PADDING), expected_full, "13.rhand")


def plain_warp(
    photo: NDArray[np.uint8], matrix: NDArray[np.float64], size: tuple[int, int]
) -> NDArray[np.uint8]:
    """OpenCV 4's fixed-point warp, one pixel at a time."""
    (a, b, tx), (c, d, ty) = matrix.tolist()
    factor = 1.0 / (a * d - b * c)
    p, q, r, s = d * factor, -b * factor, -c * factor, a * factor
    ux, uy = -(p * tx) - q * ty, -(r * tx) - s * ty
    result = np.zeros((size[1], size[0], photo.shape[2]), np.uint8)
    height, width = photo.shape[:2]
    for y in range(size[1]):
        x0, y0 = round((q * y + ux) * 1024) + 16, round((s * y + uy) * 1024) + 16
        for x in range(size[0]):
            fx, fy = (x0 + round(p * x * 1024)) >> 5, (y0 + round(r * x * 1024)) >> 5
            left, top, u, v = fx >> 5, fy >> 5, fx & 31, fy & 31
            total = np.full(photo.shape[2], 1 << 14)
            for dy, wy in ((0, 32 - v), (1, v)):
                for dx, wx in ((0, 32 - u), (1, u)):
                    if 0 <= top + dy < height and 0 <= left + dx < width:
                        total += photo[top + dy, left + dx].astype(int) * wx * wy * 32
            result[y, x] = total >> 15
    return result


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.floats(0.05, 8),
    shift=st.tuples(st.floats(-40, 40), st.floats(-40, 40)),
)
def test_warp_equals_the_plain_algorithm(
    seed: int, scale: float, shift: tuple[float, float]
) -> None:
    generator = np.random.default_rng(seed)
    photo = generator.integers(0, 256, (*generator.integers(1, 24, 2), 3), dtype=np.uint8)
    matrix = np.array([[scale, 0, shift[0]], [0, scale, shift[1]]])
    size = (12, 9)
    warped = warp_affine(photo, matrix, size)
    np.testing.assert_array_equal(warped, plain_warp(photo, matrix, size))


def test_aspect_grows_the_shorter_side() -> None:
    scale = np.array([[60, 100], [100, 60], [75, 100]], np.float32)
    grown = with_aspect(scale, 0.75)
    wanted = np.array([[75, 100], [100, 133.33333], [75, 100]])
    np.testing.assert_allclose(grown, wanted, rtol=1e-6)


def test_normalisation_equals_the_capture(expected: Tensors) -> None:
    mean = np.array([0.485, 0.456, 0.406], np.float32)
    deviation = np.array([0.229, 0.224, 0.225], np.float32)
    pixels = normalize(expected["01.body.006.crop.image_u8_hwc"], mean, deviation)
    np.testing.assert_allclose(pixels, expected["01.body.007.image.normalized"], atol=1e-6)


def test_photo_beyond_fixed_point_is_refused() -> None:
    photo = np.zeros((1, MAX_SIDE + 1, 3), np.uint8)
    with pytest.raises(InputError):
        crop_photo(photo, np.array([[0, 0, 1, 1]], np.float32), SIZE)

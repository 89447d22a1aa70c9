"""Rays, condition and projection."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sam3d_gguf.runtime.geometry.camera import (
    checked_intrinsics,
    crop_condition,
    default_intrinsics,
    photo_to_crop,
    pixel_rays,
    project,
)
from sam3d_gguf.schemas.errors import InputError

Tensors = dict[str, NDArray[Any]]


def test_default_camera_has_the_diagonal_as_focal_length() -> None:
    expected = [[500, 0, 150], [0, 500, 200], [0, 0, 1]]
    np.testing.assert_array_equal(default_intrinsics(300, 400), expected)


@pytest.mark.parametrize(
    "matrix",
    [
        np.eye(2),
        np.diag([0.0, 1, 1]),
        np.diag([1.0, -2, 1]),
        np.diag([np.nan, 1, 1]),
        np.diag([1e300, 1, 1]),
    ],
)
def test_unusable_intrinsics_are_refused(matrix: NDArray[np.float64]) -> None:
    with pytest.raises(InputError):
        checked_intrinsics(matrix)


def test_rays_equal_the_capture(expected: Tensors, intrinsics: NDArray[np.float32]) -> None:
    rays = pixel_rays(expected["01.body.003.crop.affine_trans"], intrinsics, (128, 128))
    np.testing.assert_allclose(rays, expected["01.body.008.ray.full_resolution"], atol=1e-6)


def test_condition_uses_the_principal_point_or_the_photo_middle() -> None:
    center, scale = np.array([[60, 80]], np.float32), np.array([[40, 40]], np.float32)
    photo, camera = np.array([[200, 150]], np.float32), np.diag([100, 50, 1]).astype(np.float32)
    camera[:2, 2] = 10, 20
    arguments = (center, scale, photo, camera)
    own = crop_condition(*arguments, own_center=True)
    middle = crop_condition(*arguments, own_center=False)
    np.testing.assert_allclose(own, [[0.5, 0.6, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(middle, [[-0.4, 0.05, 0.4]], rtol=1e-6)


def test_a_point_in_the_camera_plane_is_refused() -> None:
    points = np.array([[[0, 0, 1], [0, 0, -2]]], np.float32)
    translation = np.array([[0, 0, 2]], np.float32)
    with pytest.raises(InputError, match="crop 0, point 1"):
        project(points, translation, np.eye(3, dtype=np.float32)[None])


def test_crop_units_are_centred() -> None:
    affine = np.array([[[2, 0, -10], [0, 2, -20]]], np.float32)
    size = np.array([[128, 128]], np.float32)
    points = np.array([[[37, 42], [5, 10]]], np.float32)
    wanted = np.array([[[0, 0], [-0.5, -0.5]]])
    np.testing.assert_allclose(photo_to_crop(points, affine, size), wanted)

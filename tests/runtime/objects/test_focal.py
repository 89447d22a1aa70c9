"""The recovered focal lengths and shifts equal those of the original's optimiser."""

from __future__ import annotations

import math

import numpy as np
import pytest
from objects_components import Component

from sam3d_gguf.runtime.objects.focal import Recovered, recover, view_plane
from sam3d_gguf.schemas.errors import InputError

CASES = ("exact", "noisy", "far", "near", "large", "overstep", "chaos", "two", "none")


@pytest.mark.parametrize("name", CASES)
def test_focal_length_and_shift_equal_the_original_s(name: str) -> None:
    component = Component.load("depth")
    given = component.inputs
    found = recover(given[f"fit.{name}.points"], given[f"fit.{name}.mask"] == 1)
    (number,) = (each for each in component.expected if each.endswith(f"fit.{name}"))
    values = np.array([found.focal, found.shift])
    assert component.failures_of({number: values}) == []


def test_a_camera_s_points_give_its_focal_length() -> None:
    pixels = view_plane((40, 60), 1.5)
    depth = 2 + np.sin(4 * pixels[..., :1]) ** 2
    points = np.concatenate([pixels * depth / 1.25, depth - 0.5], axis=-1).astype(np.float32)
    found = recover(points, np.ones((40, 60), np.bool_))
    np.testing.assert_allclose([found.focal, found.shift], [1.25, 0.5], rtol=1e-4)


def test_the_view_plane_ends_half_a_pixel_inside_the_unit_diagonal() -> None:
    plane = view_plane((3, 4), 4 / 3)
    np.testing.assert_allclose(plane[0, 0], [-0.8 * 3 / 4, -0.6 * 2 / 3], rtol=1e-6)
    np.testing.assert_allclose(plane[2, 3], [0.8 * 3 / 4, 0.6 * 2 / 3], rtol=1e-6)
    np.testing.assert_allclose(plane[1, 2], [0.8 / 4, 0], rtol=1e-6)
    assert view_plane((1, 1), 2.0).tolist() == [[[0, 0]]]


def test_intrinsics_of_a_unit_image_plane() -> None:
    matrix = Recovered(np.float32(1.5), np.float32(0)).intrinsics((300, 400))
    # The focal length is 1.5 half diagonals of 250 pixels.
    wanted = np.array([[375 / 400, 0, 0.5], [0, 375 / 300, 0.5], [0, 0, 1]])
    np.testing.assert_allclose(matrix, wanted, rtol=1e-6)


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0])
def test_points_without_a_focal_length(value: float) -> None:
    points = np.full((8, 8, 3), value, np.float32)
    points[..., 2] = 1
    with pytest.raises(InputError, match="give no focal length"):
        recover(points, np.ones((8, 8), np.bool_))

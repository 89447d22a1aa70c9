"""Objects in a scene: points and covariances go where the pose's linear map takes them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sam3d_gguf.runtime.objects.gaussians import GaussianCloud
from sam3d_gguf.runtime.objects.placement import PosedCloud, placed, scene, turned
from sam3d_gguf.runtime.objects.pose import Pose

Array = NDArray[np.float32]
SIXTY = np.array([[0.5, 0.5, 0.5, 0.5]], np.float32)
"""A third of a turn about (1, 1, 1): the column vectors x, y, z become y, z, x."""


def pose(scale: float) -> Pose:
    translation = np.array([[1, 2, 3]], np.float32)
    return Pose(translation, SIXTY, np.full((1, 3), scale, np.float32))


def cloud(count: int, seed: int) -> GaussianCloud:
    random = np.random.default_rng(seed)

    def numbers(width: int) -> Array:
        return random.uniform(0.1, 1, (count, width)).astype(np.float32)

    return GaussianCloud(numbers(3), numbers(3), numbers(1), numbers(3), numbers(4) - 0.5)


def covariances(gaussians: GaussianCloud) -> NDArray[np.float64]:
    """R diag(s)^2 R^T with the textbook's matrix of a unit quaternion."""
    unit = gaussians.turns / np.linalg.norm(gaussians.turns, axis=1, keepdims=True)
    w, x, y, z = unit.astype(np.float64).T
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    matrix = np.moveaxis(np.array(rows), -1, 0) * gaussians.scales[:, None, :]
    result: NDArray[np.float64] = np.einsum("nij,nkj->nik", matrix, matrix)
    return result


def test_points_are_rows_times_the_pose_s_matrix() -> None:
    points = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]], np.float32)
    np.testing.assert_allclose(turned(points, pose(2)), np.roll(points, -1, axis=1), atol=1e-7)
    expected = 2 * np.roll(points, -1, axis=1) + [1, 2, 3]
    np.testing.assert_allclose(placed(points, pose(2)), expected, atol=1e-6)


def test_covariances_turn_and_grow_with_the_object() -> None:
    before = cloud(20, 0)
    after = scene([PosedCloud(before, 0.01, pose(3))])
    linear = 3 * turned(np.eye(3, dtype=np.float32), pose(3)).astype(np.float64)
    expected = linear.T @ covariances(before) @ linear
    np.testing.assert_allclose(covariances(after), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after.positions, placed(before.positions, pose(3)))
    np.testing.assert_array_equal(after.features, before.features)
    np.testing.assert_array_equal(after.logits, before.logits)
    np.testing.assert_allclose(np.linalg.norm(after.turns, axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_objects_come_one_after_another_with_the_smallest_minimum(order: tuple[int, int]) -> None:
    clouds = [cloud(4, 1), cloud(6, 2)]
    sizes = [0.05, 0.3]
    posed = [PosedCloud(clouds[index], sizes[index], pose(2)) for index in order]
    together = scene(posed)
    assert len(together.positions) == 10
    start = 0
    for index in order:
        end = start + len(clouds[index].positions)
        np.testing.assert_array_equal(together.logits[start:end], clouds[index].logits)
        own = 2 * sizes[index]
        scales = np.maximum(2 * clouds[index].scales, own * 1.1)
        expected = np.sqrt(scales**2 - own**2 + 0.1**2)
        np.testing.assert_allclose(together.scales[start:end], expected, rtol=1e-5)
        start = end

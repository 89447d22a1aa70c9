"""What the camera sees: triangles, outlines, and the camera of a pointmap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ball_scene import BALLS, FOCAL, HEIGHT, WIDTH, scene, write
from hypothesis import given
from hypothesis import strategies as st
from objects_facts import FIXTURES
from PIL import Image

from sam3d_gguf.runtime.export.raster import rasterize
from sam3d_gguf.runtime.objects.camera import Camera, camera_of
from sam3d_gguf.runtime.objects.mesh import Mesh
from sam3d_gguf.runtime.objects.pose import Pose
from sam3d_gguf.runtime.objects.result import scene_camera
from sam3d_gguf.runtime.objects.stages import ScenePoints
from sam3d_gguf.runtime.objects.view import (
    Surface,
    drawn_size,
    overlap,
    rendered,
    resized_mask,
    silhouette,
)


def ball(count: int = 40) -> Mesh:
    """A unit ball around the origin, of diameter 1, red."""
    up, around = np.meshgrid(
        np.linspace(0, np.pi, count), np.linspace(0, 2 * np.pi, count), indexing="ij"
    )
    points = np.stack(
        [np.sin(up) * np.cos(around), np.sin(up) * np.sin(around), np.cos(up)], axis=-1
    )
    rows = np.arange(count * count, dtype=np.int32).reshape(count, count)
    a, b, c, d = rows[:-1, :-1], rows[1:, :-1], rows[1:, 1:], rows[:-1, 1:]
    faces = np.concatenate([np.stack([a, b, c], -1), np.stack([a, c, d], -1)]).reshape(-1, 3)
    attributes = np.zeros((count * count, 6), np.float32)
    attributes[:, 0] = 1
    return Mesh((points.reshape(-1, 3) / 2).astype(np.float32), faces, attributes)


def pose(centre: tuple[float, ...], radius: float) -> Pose:
    return Pose(
        translation=np.array([centre], np.float32),
        rotation=np.array([[0.5, 0.5, 0.5, 0.5]], np.float32),
        scale=np.full((1, 3), 2 * radius, np.float32),
    )


def camera() -> Camera:
    return Camera(FOCAL, WIDTH, HEIGHT, 0.0)


def test_the_outline_of_a_ball_is_that_of_its_photo() -> None:
    masks = scene().masks
    for number, (centre, radius, _) in enumerate(BALLS):
        seen = silhouette(Surface.of(ball(), pose(centre, radius)), camera())
        assert overlap(seen, masks[number]) > 0.98


def test_the_nearer_surface_is_seen() -> None:
    near = Surface.of(ball(), pose((0, 0, 2), 0.2))
    far = Surface.of(ball(), pose((0, 0, 4), 0.8))
    blue = Surface(far.vertices, far.faces, np.roll(far.colors, 2, axis=1))
    behind = np.full((HEIGHT, WIDTH, 3), 7, np.uint8)
    for order in ([near, blue], [blue, near]):
        image = rendered(order, camera(), behind)
        assert image[HEIGHT // 2, WIDTH // 2, 0] > 200
        assert image[HEIGHT // 2, WIDTH // 2, 2] == 0
        assert image[HEIGHT // 2, WIDTH // 2 + 60, 2] > 100
        assert image[0, 0].tolist() == [7, 7, 7]


def test_what_lies_behind_the_camera_is_not_drawn() -> None:
    assert not silhouette(Surface.of(ball(), pose((0, 0, -2), 0.5)), camera()).any()
    around = silhouette(Surface.of(ball(), pose((0, 0, 0), 1)), camera())
    assert around.shape == (HEIGHT, WIDTH)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_triangles_against_every_pixel(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    width, height = 17, 11
    pixels = random.uniform(-8, 24, (3 * count, 2))
    depth = random.uniform(0.5, 4, 3 * count)
    faces = np.arange(3 * count, dtype=np.int32).reshape(count, 3)
    found = rasterize(pixels, depth, faces, width, height)
    for y in range(height):
        for x in range(width):
            best, wanted = 0.0, -1
            for number, face in enumerate(faces):
                matrix = np.concatenate([pixels[face].T, np.ones((1, 3))])
                shares = np.linalg.solve(matrix, [x + 0.5, y + 0.5, 1])
                near = float(shares @ (1 / depth[face]))
                if shares.min() >= 0 and near >= best:
                    best, wanted = near, number
            assert found[y, x] == wanted


def test_corners_that_are_not_finite_draw_nothing() -> None:
    pixels = np.array([[0, 0], [9, 0], [np.nan, 9], [0, 9]])
    faces = np.array([[0, 1, 2], [0, 1, 3]], np.int32)
    assert set(rasterize(pixels, np.ones(4), faces, 8, 8).reshape(-1).tolist()) == {-1, 1}


def test_a_pointmap_tells_its_camera() -> None:
    points = np.moveaxis(scene().points, -1, 0)
    points = np.where(np.isfinite(points), points, np.float32(np.nan))
    found = camera_of(points)
    assert found is not None
    assert found.focal == pytest.approx(FOCAL, rel=1e-5)
    assert found.error < 1e-3
    np.testing.assert_allclose(
        found.intrinsics,
        np.array([[FOCAL / WIDTH, 0, 0.5], [0, FOCAL / HEIGHT, 0.5], [0, 0, 1]]),
        rtol=1e-5,
    )
    pixels, _ = found.project(np.moveaxis(points, 0, -1)[300, 100][None])
    np.testing.assert_allclose(pixels, [[100.5, 300.5]], atol=1e-3)


@pytest.mark.parametrize("value", [np.nan, 0.0, -1.0])
def test_points_without_a_camera(value: float) -> None:
    assert camera_of(np.full((3, 4, 5), value, np.float32)) is None


@pytest.mark.parametrize("focal", [-0.5, 0.0, np.nan, np.inf])
def test_a_depth_model_that_tells_no_camera(focal: float) -> None:
    points = np.moveaxis(scene(48, 36).points, -1, 0)
    told = np.array([[focal, 0, 0.5], [0, focal, 0.5], [0, 0, 1]], np.float32)
    assert scene_camera(ScenePoints(points, told, estimated=True)) is None
    told[:2, :2] = [[0.875, 0], [0, 7 / 6]]
    found = scene_camera(ScenePoints(points, told, estimated=True))
    assert found is not None
    assert found.focal == 42


def test_the_files_of_the_scene_are_what_it_draws(tmp_path: Path) -> None:
    write(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        kept = FIXTURES / "two-balls" / path.name
        if path.suffix == ".npy":
            np.testing.assert_allclose(np.load(kept), np.load(path), rtol=1e-6)
            continue
        with Image.open(path) as drawn, Image.open(kept) as image:
            away = np.abs(np.asarray(drawn).astype(int) - np.asarray(image).astype(int))
        assert (away > 1).mean() < 1e-3


def test_drawings_are_bounded() -> None:
    assert drawn_size(480, 360) == (480, 360)
    assert drawn_size(30000, 10) == (1024, 1)
    assert drawn_size(768, 1536) == (512, 1024)
    assert resized_mask(np.eye(4, dtype=np.uint8) * 255, 2, 2).shape == (2, 2)
    assert overlap(np.zeros((2, 2), np.bool_), np.zeros((2, 2), np.bool_)) == 0

"""Meshes are the original's, face by face."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sam3d_gguf.runtime.loading import load_weights
from sam3d_gguf.runtime.objects.cube_cases import CORNERS, EDGES, cube_cases
from sam3d_gguf.runtime.objects.mesh import Mesh, extract_mesh
from sam3d_gguf.runtime.objects.mesh_cubes import MeshSettings
from sam3d_gguf.runtime.objects.noise import SeededNoise

SETTINGS = MeshSettings(grid=64, outside=1.0)
Coords = NDArray[np.int32]


def sha256(array: NDArray[np.int32]) -> str:
    return hashlib.sha256(array.astype("<i4").tobytes()).hexdigest()


def cubes(side: int, step: int = 1) -> Coords:
    """Every `step`th cube of a full grid."""
    places = np.argwhere(np.ones((1, side, side, side)))
    return places[::step].astype(np.int32)


def ball(coords: Coords, grid: int, radius: float) -> NDArray[np.float32]:
    """Features of a ball: distances at the corners, else 0."""
    features = np.zeros((len(coords), 101), np.float32)
    for corner, offset in enumerate(CORNERS):
        at = (coords[:, 1:] + offset) / grid - 0.5
        features[:, corner] = np.sqrt((at * at).sum(axis=1)) - radius
    return features


@pytest.mark.parametrize(
    ("grid", "step", "vertices", "faces", "points", "attributes"),
    [
        (
            8,
            1,
            663,
            "5d5876474911421818267b397dafdbf09e6c97d290060a596084bc9c4f8e1200",
            [11.917550627811579, 4.167278989742044, 4.343706187559292],
            [328.79874, 329.53806, 329.24061, 333.31845, 333.62446, 335.15925],
        ),
        (
            6,
            3,
            211,
            "6f90b8269d40107ef2a0ddc953739ad28a9a5b068cdedd3986ec9c7516c68790",
            [-3.5986539309378713, 0.24225290957838297, -20.016002101125196],
            [106.44456, 109.18015, 106.82857, 104.23365, 108.80342, 104.07522],
        ),
    ],
)
def test_noise_at_the_borders_of_the_grid_and_of_the_features_gives_the_original_s_mesh(
    grid: int, step: int, vertices: int, faces: str, points: list[float], attributes: list[float]
) -> None:
    """The numbers are of the original's mesh of these features, in its dense grid."""
    coords = cubes(grid, step)
    features = SeededNoise(grid).latent((len(coords), 101))
    mesh = extract_mesh(coords, features, MeshSettings(grid, 1.0))
    assert len(mesh.vertices) == vertices
    assert sha256(mesh.faces) == faces
    np.testing.assert_allclose(mesh.vertices.astype(np.float64).sum(axis=0), points, atol=1e-5)
    sums = mesh.attributes.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(sums, attributes, rtol=1e-6)


def test_the_order_of_cubes_changes_nothing_but_rounding() -> None:
    coords = cubes(8)
    features = SeededNoise(3).latent((len(coords), 101))
    order = np.random.default_rng(0).permutation(len(coords))
    settings = MeshSettings(8, 1.0)
    one = extract_mesh(coords, features, settings)
    other = extract_mesh(coords[order], features[order], settings)
    np.testing.assert_array_equal(one.faces, other.faces)
    np.testing.assert_allclose(one.vertices, other.vertices, atol=1e-6)


def edges_of(mesh: Mesh) -> Counter[tuple[int, int]]:
    pairs = np.concatenate([mesh.faces[:, [0, 1]], mesh.faces[:, [1, 2]], mesh.faces[:, [2, 0]]])
    return Counter((int(a), int(b)) for a, b in pairs)


@pytest.mark.parametrize("shell", [False, True])
def test_a_ball_is_closed_and_faces_outwards(shell: bool) -> None:
    grid, radius = 16, 0.3
    coords = cubes(grid)
    features = ball(coords, grid, radius - 1 / grid)
    if shell:
        near = np.abs(features[:, :8].mean(axis=1)) < 2 / grid
        coords, features = coords[near], features[near]
    mesh = extract_mesh(coords, features, MeshSettings(grid, 1.0))
    edges = edges_of(mesh)
    inner = [(a, b) for a, b in edges if a < b]
    outside = np.linalg.norm(mesh.vertices, axis=1) > radius - 1.5 / grid
    assert outside.any()
    assert all(edges[b, a] == edges[a, b] == 1 for a, b in inner)
    corners = mesh.vertices[mesh.faces]
    volume = np.einsum("fi,fi->f", corners[:, 0], np.cross(corners[:, 1], corners[:, 2])) / 6
    if not shell:
        assert outside.all()
        np.testing.assert_allclose(volume.sum(), 4 / 3 * np.pi * radius**3, rtol=0.05)
    assert volume.sum() > 0


@pytest.mark.parametrize("sign", [1, -1])
def test_no_surface_is_an_empty_mesh(sign: int) -> None:
    coords = cubes(4)
    features = np.full((len(coords), 101), sign, np.float32)
    mesh = extract_mesh(coords, features, MeshSettings(4, 1.0))
    assert (mesh.vertices.shape, mesh.faces.shape) == ((0, 3), (0, 3))
    assert mesh.attributes.shape == (0, 6)
    assert mesh.faces.dtype == np.int32
    nothing = extract_mesh(coords[:0], features[:0], MeshSettings(4, 1.0))
    assert len(nothing.faces) == 0


def test_cases_are_those_of_flexicubes() -> None:
    """The digests are of the tables that its authors publish, one byte a number."""
    tables = cube_cases()
    edges = tables.edges.astype(np.int8).tobytes()
    assert (
        hashlib.sha256(edges).hexdigest()
        == "d3f5350eced63fcaa843c7a9d4c5a15e5d031858f9c1f72a48fffc453858ff0e"
    )
    checks = np.column_stack([tables.ambiguous, tables.neighbour, tables.inverted])
    assert (
        hashlib.sha256(checks.astype(np.uint8).tobytes()).hexdigest()
        == "c2b179c4cfc3e02397231522991129bdcdd8af017f829dba356215516d01411d"
    )
    assert tables.counts.tolist() == (tables.edges[:, :, 0] >= 0).sum(axis=1).tolist()


def test_parallel_edges_have_the_same_direction() -> None:
    steps = {tuple(np.subtract(CORNERS[b], CORNERS[a]).tolist()) for a, b in EDGES}
    assert steps == {(1, 0, 0), (0, -1, 0), (0, 0, 1)}


def test_settings_are_read_from_the_converted_file(objects: Path) -> None:
    with load_weights(objects / "slat_decoder_mesh.gguf", "objects.slat_decoder_mesh") as weights:
        settings = MeshSettings.of(weights)
    assert settings == SETTINGS
    assert settings.bias == -1 / 64

"""Tables of voxels say what their definitions say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from sam3d_gguf.runtime.objects.voxels import (
    VoxelRows,
    downsampling,
    neighbours,
    subdivided,
    windows,
)

Coords = NDArray[np.int32]
Place = tuple[int, ...]


@pytest.fixture(scope="module")
def scattered() -> Coords:
    """Voxels in no order, some of a second batch, at both ends of the axes."""
    random = np.random.default_rng(3)
    coords = np.unique(random.integers(0, (2, 9, 9, 9), (700, 4)), axis=0).astype(np.int32)
    return random.permutation(coords)


def places(coords: Coords) -> list[Place]:
    return [tuple(row) for row in coords.tolist()]


def test_neighbours_are_the_voxels_beside(scattered: Coords) -> None:
    row_at = {place: row for row, place in enumerate(places(scattered))}
    table = neighbours(scattered)
    for row, (batch, x, y, z) in enumerate(places(scattered)):
        beside = itertools.product((x - 1, x, x + 1), (y - 1, y, y + 1), (z - 1, z, z + 1))
        expected = [row_at.get((batch, *place), len(scattered)) for place in beside]
        assert table[row].tolist() == expected
    assert VoxelRows(scattered).find(scattered[::-1]).tolist() == [*range(len(scattered))][::-1]


def test_downsampling_takes_cubes_together(scattered: Coords) -> None:
    down = downsampling(scattered)
    cubes = [(batch, x // 2, y // 2, z // 2) for batch, x, y, z in places(scattered)]
    assert places(down.coords) == sorted(set(cubes))
    assert [places(down.coords)[parent] for parent in down.parents.tolist()] == cubes
    for cube, children, weight in zip(
        places(down.coords), down.children.tolist(), down.weights.tolist(), strict=True
    ):
        rows = [row for row, other in enumerate(cubes) if other == cube]
        assert children == rows + [len(scattered)] * (8 - len(rows))
        assert weight == np.float32(1) / np.float32(len(rows) + 1)


def test_subdivision_puts_a_voxel_s_parts_beside_each_other() -> None:
    parts = places(subdivided(np.array([[0, 3, 1, 0], [1, 0, 0, 2]], np.int32)))
    assert parts[:8] == [(0, *place) for place in itertools.product((6, 7), (2, 3), (0, 1))]
    assert parts[8:] == [(1, *place) for place in itertools.product((0, 1), (0, 1), (4, 5))]


@pytest.mark.parametrize("shift", [0, 2])
def test_windows_hold_who_shares_one(scattered: Coords, shift: int) -> None:
    found = windows(scattered, 4, shift)
    cubes = [
        (batch, (x + shift) // 4, (y + shift) // 4, (z + shift) // 4)
        for batch, x, y, z in places(scattered)
    ]
    assert sorted(found.order.tolist()) == [*range(len(scattered))]
    each = sorted(set(cubes))
    assert found.lengths.tolist() == [cubes.count(cube) for cube in each]
    ends = np.cumsum(found.lengths)
    for cube, rows in zip(each, np.split(found.order, ends[:-1]), strict=True):
        assert {cubes[row] for row in rows.tolist()} == {cube}

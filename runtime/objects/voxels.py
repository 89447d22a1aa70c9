"""Which voxels there are, and who is beside, above and below whom: index tables, no dense grids.

Coordinates are [N, 4] int32: batch, x, y, z. A table names rows by number; where there is no voxel
it says N, the number of a row of zeros that who gathers puts after the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.geometry.arrays import Float32, Int32

_Int64 = NDArray[np.int64]
_SIDE = 1 << 15
"""More than any coordinate; with a margin of one it fits four times into 64 bits."""

TAPS: tuple[tuple[int, int, int], ...] = tuple(
    (x, y, z) for x in (-1, 0, 1) for y in (-1, 0, 1) for z in (-1, 0, 1)
)
"""Offsets of a 3x3x3 kernel in the order of its taps, (x * 3 + y) * 3 + z."""

CORNERS: tuple[tuple[int, int, int], ...] = tuple(
    (x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)
)
"""Offsets of the eight parts of a voxel in the order of a subdivision."""


class VoxelRows:
    """The row of every voxel, by its place.

    Args:
        coords: [N, 4], no voxel twice, no coordinate negative.
    """

    __slots__ = ("_codes", "_order")

    def __init__(self, coords: Int32) -> None:
        codes = _codes(coords)
        self._order = np.argsort(codes, kind="stable")
        self._codes = codes[self._order]

    def find(self, coords: Int32) -> Int32:
        """[M] rows of the voxels at [M, 4]; N where there is none."""
        return self._find(_codes(coords))

    def at(self, offset: tuple[int, int, int]) -> Int32:
        """[N] the row of every voxel's neighbour at an offset; N where there is none."""
        found = self._find(self._codes + _code_of(offset))
        rows = np.empty_like(found)
        rows[self._order] = found
        return rows

    def _find(self, codes: _Int64) -> Int32:
        places = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        rows = np.where(self._codes[places] == codes, self._order[places], len(self._codes))
        return rows.astype(np.int32)


def neighbours(coords: Int32) -> Int32:
    """[N, 27] rows that a 3x3x3 submanifold convolution reads, in the order of `TAPS`."""
    rows = VoxelRows(coords)
    table = np.empty((len(coords), len(TAPS)), np.int32)
    for tap, offset in enumerate(TAPS):
        table[:, tap] = rows.at(offset)
    return table


@dataclass(frozen=True, slots=True, eq=False)
class Downsampling:
    """N voxels taken together in cubes, and back.

    Attributes:
        coords: [M, 4] of the cubes, sorted.
        parents: [N] the cube of every voxel, which an upsampling gathers.
        children: [M, factor^3] the voxels of every cube in the order of their rows, then N.
        weights: [M] float32: the original's mean is the sum times 1 / (count + 1).
    """

    coords: Int32
    parents: Int32
    children: Int32
    weights: Float32


def downsampling(coords: Int32, factor: int = 2) -> Downsampling:
    """The cubes of side `factor` that hold voxels."""
    cubes = coords.copy()
    cubes[:, 1:] //= factor
    codes, first, parents, counts = np.unique(
        _codes(cubes), return_index=True, return_inverse=True, return_counts=True
    )
    children = np.full((len(codes), factor**3), len(coords), np.int32)
    order = np.argsort(parents, kind="stable")
    starts = np.cumsum(counts) - counts
    places = np.arange(len(coords)) - np.repeat(starts, counts)
    children[parents[order], places] = order
    return Downsampling(
        coords=cubes[first],
        parents=parents.astype(np.int32),
        children=children,
        weights=np.reciprocal((counts + 1).astype(np.float32)),
    )


def subdivided(coords: Int32) -> Int32:
    """[8 N, 4]: every voxel's eight parts one after another, in the order of `CORNERS`; row i is
    a part of voxel i // 8."""
    parts = np.repeat(coords, len(CORNERS), axis=0)
    parts[:, 1:] = parts[:, 1:] * 2 + np.tile(np.array(CORNERS, np.int32), (len(coords), 1))
    return parts


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Voxels that attend to each other.

    Attributes:
        order: [N] rows, window after window.
        lengths: [W] voxels of each window, in that order.
    """

    order: Int32
    lengths: Int32


def windows(coords: Int32, size: int, shift: int) -> Windows:
    """Windows of side `size` of the coordinates plus `shift`; nothing wraps around."""
    cubes = coords.copy()
    cubes[:, 1:] = (cubes[:, 1:] + shift) // size
    _, numbers, lengths = np.unique(_codes(cubes), return_inverse=True, return_counts=True)
    order = np.argsort(numbers, kind="stable")
    return Windows(order.astype(np.int32), lengths.astype(np.int32))


def _codes(coords: NDArray[Any]) -> _Int64:
    """One number for each place, in the order of batch, x, y, z."""
    wide = coords.astype(np.int64)
    return ((wide[:, 0] * _SIDE + wide[:, 1]) * _SIDE + wide[:, 2]) * _SIDE + wide[:, 3]


def _code_of(offset: tuple[int, int, int]) -> int:
    return (offset[0] * _SIDE + offset[1]) * _SIDE + offset[2]

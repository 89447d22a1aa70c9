"""From the mesh decoder's features to the cubes that the surface runs through.

The original fills a dense grid, where what has no features is at the distance +1 and all else of it
is 0. Here only the cubes are made that the surface needs, those without features among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.geometry.arrays import Bool, Float32, Int32
from sam3d_gguf.runtime.ggml.host_memory import check_available
from sam3d_gguf.runtime.objects.activations import sigmoid
from sam3d_gguf.runtime.objects.cube_cases import CORNERS
from sam3d_gguf.runtime.objects.metadata import integer, number
from sam3d_gguf.runtime.weights import Weights

Int64 = NDArray[np.int64]

ATTRIBUTES = 6
_DEFORM, _WEIGHTS, _COLOR = 8, 32, 53
"""Where the values of a cube begin after its distances [8]: offsets [8, 3], weights [21], attributes
[8, 6]."""

_CUBE_BYTES, _SURFACE_BYTES = 600, 1600
"""Memory that a cube takes, and one of the surface, measured with all kinds of features."""

_REACH = 1 - 1e-8
_OFFSETS = np.array(CORNERS, np.int64)


@dataclass(frozen=True, slots=True)
class MeshSettings:
    """Numbers of a mesh decoder.

    Attributes:
        grid: side of the grid of cubes.
        outside: distance where no cube has features.
    """

    grid: int
    outside: float

    @classmethod
    def of(cls, weights: Weights) -> Self:
        """The settings in an opened `slat_decoder_mesh`.

        Raises:
            ContractError: one is missing or of the wrong kind.
        """
        return cls(4 * integer(weights, "resolution"), number(weights, "mesh.outside_sdf"))

    @property
    def bias(self) -> float:
        """What is added to the decoded distances."""
        return -1 / self.grid


@dataclass(frozen=True, slots=True, eq=False)
class SurfaceCubes:
    """The S cubes that the surface runs through, x slowest, and V corners in the same order.

    Attributes:
        places: [S, 3].
        corners: [S, 8] corner numbers.
        weights: [S, 21] as decoded.
        points: [V, 3] in -0.5..0.5, moved by the decoded offsets.
        distances: [V], below 0 inside.
        attributes: [V, 6] in 0..1.
    """

    places: Int64
    corners: Int64
    weights: Float32
    points: Float32
    distances: Float32
    attributes: Float32


def surface_cubes(coords: Int32, features: Float32, settings: MeshSettings) -> SurfaceCubes:
    """The cubes of the surface.

    Args:
        coords: [N, 4], no cube twice: batch 0, x, y, z below the grid's side.
        features: [N, 101], as decoded.
        settings: of the decoder.

    Raises:
        BackendError: this machine has too little memory.
    """
    side = settings.grid + 1
    check_available(_CUBE_BYTES * len(coords), "the mesh's cubes")
    grid = _CornerMeans(coords[:, 1:].astype(np.int64), side)
    distances = grid.means(features[:, :_DEFORM, None] + np.float32(settings.bias))[:, 0]
    rows = np.flatnonzero(is_crossed(distances[grid.corners]))
    open_corners = (distances < 0) & (grid.counts < 8)
    most = len(rows) + 8 * int(open_corners.sum())
    check_available(_SURFACE_BYTES * most, "the cubes of the mesh's surface")
    bare = grid.beside(open_corners)
    codes = np.concatenate([grid.cubes[rows], bare])
    order = np.argsort(codes)
    codes, rows = codes[order], np.concatenate([rows, np.full(len(bare), -1)])[order]
    used, corners = np.unique(_corner_codes(_places(codes, side), side), return_inverse=True)
    corners = corners.reshape(-1, 8)
    field = grid.at(used, distances[:, None], settings.outside)[:, 0]
    kept = is_crossed(field[corners])
    offsets, attributes = _corner_values(grid, used, features)
    return SurfaceCubes(
        places=_places(codes[kept], side),
        corners=corners[kept],
        weights=_rows_or_zeros(features[:, _WEIGHTS:_COLOR], rows[kept]),
        points=_moved(_places(used, side), offsets, settings.grid),
        distances=field,
        attributes=sigmoid(attributes),
    )


def is_crossed(distances: Float32) -> Bool:
    """[S] cubes of [S, 8] distances that have corners on both sides."""
    inside = (distances < 0).sum(axis=1)
    crossed: Bool = (inside > 0) & (inside < 8)
    return crossed


class _CornerMeans:
    """The corners that cubes share, and means over the cubes that meet there.

    Attributes:
        cubes: [N] place of every cube as one number.
        codes: [C] place of every corner, sorted.
        corners: [N, 8] corner numbers.
        counts: [C] cubes at a corner.
    """

    __slots__ = ("_side", "codes", "corners", "counts", "cubes")

    def __init__(self, places: Int64, side: int) -> None:
        self._side = side
        self.cubes = _codes(places, side)
        codes, corners = np.unique(_corner_codes(places, side), return_inverse=True)
        self.codes: Int64 = codes
        self.corners: Int64 = corners.reshape(-1, 8)
        self.counts: Int64 = np.bincount(corners.reshape(-1), minlength=len(codes))

    def means(self, values: Float32, wanted: Bool | None = None) -> Float32:
        """[C, K] means of [N, 8, K]; only of the wanted corners, where they are given."""
        chosen = np.ones(len(self.codes), np.bool_) if wanted is None else wanted
        number = np.cumsum(chosen) - 1
        sums = np.zeros((values.shape[2], int(chosen.sum())))
        for corner in range(8):
            rows = np.flatnonzero(chosen[self.corners[:, corner]])
            at = number[self.corners[rows, corner]]
            for kind, row in enumerate(sums):
                row += np.bincount(at, values[rows, corner, kind], minlength=len(row))
        means: Float32 = (sums / self.counts[chosen]).T.astype(np.float32)
        return means

    def beside(self, corners: Bool) -> Int64:
        """The cubes at some corners that are in the grid and not among these."""
        places = (_places(self.codes[corners], self._side)[:, None] - _OFFSETS).reshape(-1, 3)
        within = ((places >= 0) & (places < self._side - 1)).all(axis=1)
        return np.setdiff1d(_codes(places[within], self._side), self.cubes)

    def at(self, codes: Int64, values: Float32, otherwise: float) -> Float32:
        """[W, K] the values of [C, K] at some places."""
        rows = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        known = self.codes[rows] == codes
        return np.where(known[:, None], values[rows], np.float32(otherwise))


def _corner_values(grid: _CornerMeans, used: Int64, features: Float32) -> tuple[Float32, Float32]:
    """Offsets [W, 3] and attributes [W, 6] of some corners, 0 where no cube has features."""
    offsets = features[:, _DEFORM:_WEIGHTS].reshape(-1, 8, 3)
    attributes = features[:, _COLOR:].reshape(-1, 8, ATTRIBUTES)
    wanted = np.isin(grid.codes, used, assume_unique=True)
    found: list[Float32] = []
    for values in (offsets, attributes):
        every = np.zeros((len(wanted), values.shape[2]), np.float32)
        every[wanted] = grid.means(values, wanted)
        found.append(grid.at(used, every, 0))
    return found[0], found[1]


def _moved(places: Int64, offsets: Float32, grid: int) -> Float32:
    """Corners in -0.5..0.5, each moved by less than half a cube."""
    moves: Float32 = np.tanh(offsets)
    moves *= np.float32(_REACH / (grid * 2))
    moves += places.astype(np.float32) / np.float32(grid) - np.float32(0.5)
    return moves


def _rows_or_zeros(values: Float32, rows: Int64) -> Float32:
    return np.where(rows[:, None] >= 0, values[rows], np.float32(0))


def _corner_codes(places: Int64, side: int) -> Int64:
    return _codes(places[:, None] + _OFFSETS, side)


def _codes(places: NDArray[Any], side: int) -> Int64:
    """[..., 3] to one number, x slowest."""
    codes: Int64 = (places[..., 0] * side + places[..., 1]) * side + places[..., 2]
    return codes


def _places(codes: Int64, side: int) -> Int64:
    return np.stack([codes // side**2, codes // side % side, codes % side], axis=-1)

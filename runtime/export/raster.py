"""Draw triangles into a grid of pixels with a depth buffer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.geometry.arrays import Float64, Int32

_PIXELS_AT_A_TIME = 1 << 21
_Int64 = NDArray[np.int64]


def rasterize(pixels: Float64, depth: Float64, faces: Int32, width: int, height: int) -> Int32:
    """[height, width] the number of the triangle that is seen at each pixel's centre; -1 for none.

    Triangles with a corner that is not finite are left out; of two at the same depth the later one
    is seen. Depth is perspective.

    Args:
        pixels: [V, 2] x right, y down.
        depth: [V] distances along the view, above 0.
        faces: [F, 3].
    """
    corners = pixels[faces]
    usable = np.flatnonzero(np.isfinite(corners).all(axis=(1, 2)))
    corners, nearness = corners[usable], 1 / depth[faces[usable]]
    # The centres of pixels: i + 0.5 is in [low, high] for whole i.
    low = np.ceil(corners.min(axis=1) - 0.5).clip(0, (width, height)).astype(np.int64)
    high = np.floor(corners.max(axis=1) - 0.5).clip(-1, (width - 1, height - 1)).astype(np.int64)
    sides = np.maximum(high - low + 1, 0)
    counts = sides[:, 0] * sides[:, 1]
    seen = np.full(height * width, -1, np.int32)
    best = np.zeros(height * width)
    for part in _parts(counts):
        _draw(
            corners[part], nearness[part], low[part], sides[part], usable[part], width, best, seen
        )
    return seen.reshape(height, width)


def _parts(counts: _Int64) -> list[_Int64]:
    """The triangles that cover pixels, so many at a time that their pixels are few."""
    rows = np.flatnonzero(counts)
    groups = np.cumsum(counts[rows]) // _PIXELS_AT_A_TIME
    return [rows[groups == group] for group in np.unique(groups)]


def _draw(
    corners: Float64,
    nearness: Float64,
    low: _Int64,
    sides: _Int64,
    numbers: _Int64,
    width: int,
    best: Float64,
    seen: Int32,
) -> None:
    counts = sides[:, 0] * sides[:, 1]
    owner = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    x = low[owner, 0] + place % sides[owner, 0]
    y = low[owner, 1] + place // sides[owner, 0]
    at = np.stack([x, y], axis=-1).astype(np.float64) + 0.5
    shares = np.stack(
        [
            _turn(corners[owner, (corner + 1) % 3], corners[owner, (corner + 2) % 3], at)
            for corner in range(3)
        ],
        axis=-1,
    )
    area = shares.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares /= area[:, None]
        inside = (shares >= 0).all(axis=1)
        near = (shares * nearness[owner]).sum(axis=1)
    pixel, near, triangle = (y * width + x)[inside], near[inside], numbers[owner[inside]]
    np.maximum.at(best, pixel, near)
    front = near == best[pixel]
    seen[pixel[front]] = triangle[front]


def _turn(a: Float64, b: Float64, c: Float64) -> Float64:
    """[M] twice the signed areas of triangles of [M, 2] corners."""
    first, second = b - a, c - a
    result: Float64 = first[:, 0] * second[:, 1] - first[:, 1] * second[:, 0]
    return result

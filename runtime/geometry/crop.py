"""From a box in the photo to the model's square crop, bit for bit as OpenCV 4 warps it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32, Float64, Int32, Uint8
from sam3d_gguf.schemas.errors import InputError

BODY_PADDING = 1.25
HAND_PADDING = 0.9
PRIOR_ASPECT = 0.75
MAX_SIDE = 32766
"""Largest image side: OpenCV's fixed-point coordinates are 16-bit."""


@dataclass(frozen=True, slots=True)
class Crop:
    """Where the crops of B boxes lie, and their pixels. All but `image` and `matrix` float32.

    Attributes:
        box: [B, 4] x0, y0, x1, y1, pixels of the photo.
        center: [B, 2] of the box, pixels.
        scale: [B, 2] width and height of the padded crop, pixels of the photo.
        affine: [B, 2, 3] photo pixels to crop pixels.
        photo_size: [B, 2] width, height.
        size: [B, 2] width, height of the crop.
        image: [B, H, W, 3] uint8 RGB.
        matrix: [B, 2, 3] float64, the matrix that warped; `affine` is its float32 copy.
    """

    box: Float32
    center: Float32
    scale: Float32
    affine: Float32
    photo_size: Float32
    size: Float32
    image: Uint8
    matrix: Float64


def crop_photo(
    photo: Uint8, boxes: Float32, size: tuple[int, int], padding: float = BODY_PADDING
) -> Crop:
    """Cut the padded, aspect-corrected boxes out of a photo.

    Args:
        photo: [H, W, 3] uint8 RGB.
        boxes: [B, 4] x0, y0, x1, y1 float32, pixels.
        size: width, height of the crop.
        padding: factor on the box's sides before the aspect correction.

    Raises:
        InputError: the photo is too large.
    """
    height, width = photo.shape[:2]
    if max(height, width) > MAX_SIDE:
        raise InputError(f"the photo is {width}x{height}", expected=f"sides up to {MAX_SIDE}")
    center, scale = center_and_scale(boxes, padding)
    scale = with_aspect(with_aspect(scale, PRIOR_ASPECT), size[0] / size[1])
    matrix = np.stack(
        [affine_matrix(c, s, size) for c, s in zip(center, scale, strict=True)], axis=0
    )
    image = np.stack([warp_affine(photo, m, size) for m in matrix], axis=0)
    count = len(boxes)
    return Crop(
        box=boxes.astype(np.float32),
        center=center,
        scale=scale,
        affine=matrix.astype(np.float32),
        photo_size=np.tile(np.array([width, height], np.float32), (count, 1)),
        size=np.tile(np.array(size, np.float32), (count, 1)),
        image=image,
        matrix=matrix,
    )


def center_and_scale(boxes: Float32, padding: float) -> tuple[Float32, Float32]:
    """[B, 4] corners to centres [B, 2] and padded width and height [B, 2]."""
    low, high = boxes[:, :2], boxes[:, 2:]
    return (low + high) * np.float32(0.5), (high - low) * np.float32(padding)


def with_aspect(scale: Float32, aspect: float) -> Float32:
    """Grow width or height of [B, 2] until width / height is `aspect`."""
    width, height = scale[:, :1], scale[:, 1:]
    ratio = np.float32(aspect)
    return np.where(
        width > height * ratio,
        np.hstack([width, width / ratio]),
        np.hstack([height * ratio, height]),
    )


def affine_matrix(center: Float32, scale: Float32, size: tuple[int, int]) -> Float64:
    """The [2, 3] float64 map of photo pixels to crop pixels, without rotation.

    It is solved from three float32 point pairs as OpenCV's `getAffineTransform` does, so that
    its last bits, which decide pixels, are the same.
    """
    source = _three_points(center, float(scale[0]) * -0.5)
    half = np.array([size[0] * 0.5, size[1] * 0.5], np.float32)
    target = _three_points(half, size[0] * -0.5)
    rows: list[list[float]] = []
    values: list[float] = []
    for axis in range(2):
        for (x, y), point in zip(source.tolist(), target.tolist(), strict=True):
            known = [x, y, 1.0]
            rows.append([*known, 0.0, 0.0, 0.0] if axis == 0 else [0.0, 0.0, 0.0, *known])
            values.append(point[axis])
    interleaved = [0, 3, 1, 4, 2, 5]
    solution = _solve([rows[i] for i in interleaved], [values[i] for i in interleaved])
    return np.array(solution, np.float64).reshape(2, 3)


def _three_points(center: Float32, up: float) -> Float32:
    points = np.zeros((3, 2), np.float32)
    points[0] = center
    points[1] = center + np.array([0.0, up])
    across = points[0] - points[1]
    points[2] = points[1] + np.array([-across[1], across[0]], np.float32)
    return points


def _solve(rows: list[list[float]], values: list[float]) -> list[float]:
    """Gauss elimination with row pivots, in the operation order of OpenCV's LU solver."""
    count = len(rows)
    for i in range(count):
        pivot = i
        for j in range(i + 1, count):
            if abs(rows[j][i]) > abs(rows[pivot][i]):
                pivot = j
        if abs(rows[pivot][i]) < np.finfo(np.float64).eps * 100:
            return [0.0] * count
        rows[i], rows[pivot] = rows[pivot], rows[i]
        values[i], values[pivot] = values[pivot], values[i]
        factor = -1.0 / rows[i][i]
        for j in range(i + 1, count):
            alpha = rows[j][i] * factor
            for k in range(i + 1, count):
                rows[j][k] += alpha * rows[i][k]
            values[j] += alpha * values[i]
    for i in reversed(range(count)):
        total = values[i]
        for k in range(i + 1, count):
            total -= rows[i][k] * values[k]
        values[i] = total / rows[i][i]
    return values


def warp_affine(photo: Uint8, matrix: Float64, size: tuple[int, int]) -> Uint8:
    """Bilinear warp in OpenCV 4's fixed point: 1/32 pixel steps, 15-bit weights, zero border.

    Args:
        photo: [H, W, C] uint8.
        matrix: [2, 3] float64, photo to crop.
        size: width, height of the result.
    """
    x_steps, x_starts, y_steps, y_starts = _fixed_coordinates(inverted(matrix), size)
    if (x_starts == x_starts[0]).all() and (y_steps == y_steps[0]).all():
        return _warp_upright(photo, (x_starts[0] + x_steps) >> 5, (y_starts + y_steps[0]) >> 5)
    columns, rows = (x_starts[:, None] + x_steps) >> 5, (y_starts[:, None] + y_steps) >> 5
    x, y = np.clip(columns >> 5, -32768, 32767), np.clip(rows >> 5, -32768, 32767)
    fx, fy = columns & 31, rows & 31
    total = np.full((*x.shape, photo.shape[2]), 1 << 14, np.int32)
    for dy, wy in ((0, 32 - fy), (1, fy)):
        for dx, wx in ((0, 32 - fx), (1, fx)):
            total += _tap(photo, x + dx, y + dy, wx * wy * 32)
    return (total >> 15).astype(np.uint8)


def _warp_upright(photo: Uint8, columns: Int32, rows: Int32) -> Uint8:
    """The warp where x depends on the column alone and y on the row alone.

    The sum of the four taps is exact in integers, so it may be taken axis by axis.
    """
    size = (len(rows), len(columns), photo.shape[2])
    total = np.full(size, 1 << 14, np.int32)
    for places, row_weights in _neighbours(rows, photo.shape[0]):
        lines = photo[places]
        line_total = np.zeros(size, np.int32)
        for across, weights in _neighbours(columns, photo.shape[1]):
            line_total += np.take(lines, across, axis=1) * weights[:, None]
        total += line_total * (row_weights * 32)[:, None, None]
    return (total >> 15).astype(np.uint8)


def _neighbours(positions: Int32, length: int) -> Iterator[tuple[Int32, Int32]]:
    """Both neighbours of positions in 1/32 pixel, and their weights; 0 outside the photo.

    The weights of an axis add up to 32.
    """
    first, fraction = np.clip(positions >> 5, -32768, 32767), positions & 31
    for step, weight in ((0, 32 - fraction), (1, fraction)):
        place = first + step
        inside = (place >= 0) & (place < length)
        yield np.where(inside, place, 0), np.where(inside, weight, 0).astype(np.int32)


def warp_affine_float(photo: Uint8, matrix: Float64, size: tuple[int, int]) -> Uint8:
    """The same warp as OpenCV 5 computes it: exact positions and weights in float32.

    The original leaves OpenCV unpinned; this tells what its other choice would have cut out.
    """
    inverse = inverted(matrix).astype(np.float32)
    x, y = np.arange(size[0], dtype=np.float32), np.arange(size[1], dtype=np.float32)[:, None]
    column, row = (inverse[i, 0] * x + (inverse[i, 1] * y + inverse[i, 2]) for i in range(2))
    left, top = np.floor(column), np.floor(row)
    fx, fy = (column - left)[..., None], (row - top)[..., None]
    xi, yi = left.astype(np.int32), top.astype(np.int32)
    one = np.ones_like(xi)
    corners = [_tap(photo, xi + dx, yi + dy, one) for dy in (0, 1) for dx in (0, 1)]
    p00, p01, p10, p11 = (corner.astype(np.float32) for corner in corners)
    upper, lower = p00 + fx * (p01 - p00), p10 + fx * (p11 - p10)
    blended: Float32 = upper + fy * (lower - upper)
    return np.rint(blended).astype(np.uint8)


def inverted(matrix: Float64) -> Float64:
    """The inverse [2, 3] map, in the operation order of OpenCV's `warpAffine`."""
    (m00, m01, m02), (m10, m11, m12) = matrix.tolist()
    determinant = m00 * m11 - m01 * m10
    factor = 1.0 / determinant if determinant != 0.0 else 0.0
    a00, a11 = m11 * factor, m00 * factor
    a01, a10 = m01 * -factor, m10 * -factor
    b0 = -a00 * m02 - a01 * m12
    b1 = -a10 * m02 - a11 * m12
    return np.array([[a00, a01, b0], [a10, a11, b1]])


def _fixed_coordinates(
    inverse: Float64, size: tuple[int, int]
) -> tuple[Int32, Int32, Int32, Int32]:
    """x and y in 1/1024 pixel as (steps by column, starts by row), for x and then for y."""
    x, y = np.arange(size[0]), np.arange(size[1])
    steps = [_rounded(inverse[axis, 0] * x * 1024) for axis in range(2)]
    starts = [_rounded((inverse[axis, 1] * y + inverse[axis, 2]) * 1024) + 16 for axis in range(2)]
    return steps[0], starts[0], steps[1], starts[1]


def _rounded(values: Float64) -> Int32:
    limits = np.iinfo(np.int32)
    return np.clip(np.rint(values), limits.min // 2, limits.max // 2).astype(np.int32)


def _tap(photo: Uint8, x: Int32, y: Int32, weight: Int32) -> Int32:
    height, width = photo.shape[:2]
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    pixels = photo[np.where(inside, y, 0), np.where(inside, x, 0)]
    return pixels.astype(np.int32) * np.where(inside, weight, 0)[..., None]


def normalize(image: Uint8, mean: Float32, deviation: Float32) -> Float32:
    """[B, H, W, 3] uint8 to [B, 3, H, W] float32: (x / 255 - mean) / deviation by channel."""
    values = np.arange(256, dtype=np.float32) / np.float32(255)
    table: Float32 = (values - mean[:, None]) / deviation[:, None]
    planes = np.empty((len(image), 3, *image.shape[1:3]), np.float32)
    for channel, known in enumerate(table):
        planes[:, channel] = known[image[..., channel]]
    return planes

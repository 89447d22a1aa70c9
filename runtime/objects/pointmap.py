"""Pointmaps, a point for each pixel: axes, normalisation, resizing. Invalid points are NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.objects.resize import Size, bilinear, nearest
from sam3d_gguf.schemas.errors import InputError

_IN_MASK = 0.5
_SCALES = (1e-9, 1e9)
"""Beyond these, sizes of Gaussians are no float32 numbers any more."""


@dataclass(frozen=True, slots=True, eq=False)
class NormalizedPoints:
    """A pointmap less `shift`, over `scale`.

    Attributes:
        points: [3, H, W] float32, NaN where a point is invalid.
        scale, shift: [3] float32, of the scene.
    """

    points: Float32
    scale: Float32
    shift: Float32


def from_depth_model(points: Float32) -> Float32:
    """[H, W, 3] with x right, y down, z forward to [3, H, W] with x left, y up, z forward.

    A point that is not finite is NaN in all its coordinates.
    """
    turned = np.moveaxis(points, -1, 0) * np.array([-1, -1, 1], np.float32)[:, None, None]
    return _invalid_as_nan(turned)


def from_file(points: Float32, size: Size) -> Float32:
    """[H, W, 3] with x left, y up, z forward to [3, *size], nearest.

    Raises:
        InputError: another shape or type.
    """
    if points.ndim != 3 or points.shape[2] != 3 or points.size == 0 or points.dtype != np.float32:
        raise InputError(
            f"the pointmap is {points.dtype} {list(points.shape)}",
            expected="float32 [height, width, 3]",
        )
    return np.ascontiguousarray(nearest(np.moveaxis(points, -1, 0), size))


def normalized(points: Float32, mask: Float32) -> NormalizedPoints:
    """Normalise as the original's `ObjectCentricSSI`.

    The shift is the median of each axis over the mask, the scale the median over all pixels of a
    point's largest distance from it along an axis. Of an even number the lower one is the median.

    Args:
        points: [3, H, W].
        mask: [1, h, w] in 0..1; brought to the pointmap's size by nearest.

    Raises:
        InputError: no point in the mask is finite, or they have no extent.
    """
    inside = nearest(mask, (points.shape[1], points.shape[2]))[0] > _IN_MASK
    of_object = points[:, inside]
    if not np.isfinite(of_object).any():
        raise InputError(
            "the pointmap has no finite point where the mask is set",
            action="Give a pointmap of the photo, or another mask.",
        )
    shift = np.array([_lower_median(axis) for axis in of_object], np.float32)
    distance = np.abs(points - shift[:, None, None]).max(axis=0)
    scale = np.full(3, _lower_median(distance), np.float32)
    if not _SCALES[0] <= scale[0] <= _SCALES[1]:
        raise InputError(
            f"the pointmap's extent is {scale[0]:.3g}",
            expected=f"{_SCALES[0]:g} to {_SCALES[1]:g} of its unit",
            action="Give points that do not lie in one place, in another unit.",
        )
    return NormalizedPoints(normalized_by(points, scale, shift), scale, shift)


def normalized_by(points: Float32, scale: Float32, shift: Float32) -> Float32:
    """[3, H, W] less `shift`, over `scale`."""
    factor = np.reciprocal(scale)[:, None, None]
    return _invalid_as_nan(points * factor - shift[:, None, None] * factor)


def resized(points: Float32, size: Size) -> Float32:
    """[3, H, W] to `size`: bilinear over the valid points, NaN where the nearest one is invalid."""
    invalid = np.isnan(points).max(axis=0, keepdims=True)
    result = bilinear(np.where(np.isnan(points), np.float32(0), points), size)
    result[:, nearest(invalid, size)[0]] = np.nan
    return result


def _lower_median(values: Float32) -> np.float32:
    """The median of the numbers among `values`; NaN if there are none."""
    valid = values[~np.isnan(values)]
    if valid.size == 0:
        return np.float32(np.nan)
    middle = (valid.size - 1) // 2
    return np.float32(np.partition(valid, middle)[middle])


def _invalid_as_nan(points: Float32) -> Float32:
    return np.where(np.isfinite(points).all(axis=0), points, np.float32(np.nan))

"""Resize planes as PyTorch does it: nearest, and bilinear with antialiasing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.geometry.arrays import Float32

Size = tuple[int, int]
"""Height, width."""


def nearest(planes: NDArray[Any], size: Size) -> NDArray[Any]:
    """[..., H, W] to `size` as `interpolate(mode="nearest")`: a pixel comes from the source pixel
    floor(index * scale), scale in float32."""
    height, width = planes.shape[-2:]
    if (height, width) == size:
        return planes
    rows, columns = _nearest_indices(height, size[0]), _nearest_indices(width, size[1])
    return planes[..., rows[:, None], columns]


def bilinear(planes: Float32, size: Size) -> Float32:
    """[..., H, W] to `size` as `interpolate(mode="bilinear", antialias=True)`.

    When an axis shrinks, the triangle is widened by its scale, so that every source pixel counts.
    """
    height, width = planes.shape[-2:]
    if width != size[1]:
        planes = _along_last(planes, size[1])
    if height != size[0]:
        planes = np.swapaxes(_along_last(np.swapaxes(planes, -1, -2), size[0]), -1, -2)
    return np.ascontiguousarray(planes)


def _nearest_indices(count: int, target: int) -> NDArray[np.intp]:
    scale = np.float32(count) / np.float32(target)
    indices = np.floor(np.arange(target, dtype=np.float32) * scale).astype(np.intp)
    bounded: NDArray[np.intp] = np.minimum(indices, count - 1)
    return bounded


def _along_last(planes: Float32, target: int) -> Float32:
    """The last axis resampled: a sum over the taps that any target pixel has."""
    first, weights = _triangle(planes.shape[-1], target)
    result = np.zeros((*planes.shape[:-1], target), np.float32)
    for tap in range(weights.shape[1]):
        sources = np.minimum(first + tap, planes.shape[-1] - 1)
        result += planes[..., sources] * weights[:, tap]
    return result


def _triangle(count: int, target: int) -> tuple[NDArray[np.intp], Float32]:
    """First source pixel [target] and weights [target, taps], zero where a pixel has fewer taps.

    In float32 as in PyTorch: at hundreds of pixels the centres' rounding is seen in the weights.
    """
    half = np.float32(0.5)
    scale = np.float32(count) / np.float32(target)
    width = max(scale, np.float32(1))
    center = (np.arange(target, dtype=np.float32) + half) * scale
    first = np.maximum((center - width + half).astype(np.intp), 0)
    end = np.minimum((center + width + half).astype(np.intp), count)
    taps = first[:, None] + np.arange(int((end - first).max()))
    offset = taps.astype(np.float32) - center[:, None] + half
    weights = np.maximum(1 - np.abs(offset * (1 / width)), np.float32(0))
    weights[taps >= end[:, None]] = 0
    return first, weights / weights.sum(axis=1, keepdims=True)

"""Resize planes as PyTorch does it: nearest, bilinear and bicubic, with antialiasing or without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.geometry.arrays import Float32

Size = tuple[int, int]
"""Height, width."""

_CUBIC = -0.75
_CUBIC_ANTIALIASED = -0.5
"""The second derivative's parameter of Keys' cubic, which PyTorch chooses by antialiasing."""


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """The source pixels of each target pixel along an axis, without antialiasing.

    Attributes:
        sources: [taps, target] pixels.
        weights: [taps, target] float32.
    """

    sources: NDArray[np.intp]
    weights: Float32

    def matrix(self, count: int) -> Float32:
        """[target, count] weights of all source pixels."""
        result = np.zeros((self.sources.shape[1], count), np.float32)
        targets = np.arange(len(result))
        for sources, weights in zip(self.sources, self.weights, strict=True):
            np.add.at(result, (targets, sources), weights)
        return result


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
    return _antialiased(planes, size, _TRIANGLE)


def bicubic(planes: Float32, size: Size) -> Float32:
    """[..., H, W] to `size` as `interpolate(mode="bicubic", antialias=True)`."""
    return _antialiased(planes, size, _KEYS)


def linear_taps(count: int, target: int) -> Taps:
    """Of `interpolate(mode="bilinear")` to a size: two for each target pixel."""
    places = np.maximum(_centers(np.float32(count) / np.float32(target), target), np.float32(0))
    lower = np.minimum(places.astype(np.intp), count - 1)
    upper = np.minimum(lower + 1, count - 1)
    weight = places - lower.astype(np.float32)
    return Taps(np.stack([lower, upper]), np.stack([1 - weight, weight]))


def cubic_taps(count: int, target: int, factor: float) -> Taps:
    """Of `interpolate(mode="bicubic", scale_factor=factor)`: four for each target pixel."""
    places = _centers(np.float32(1 / factor), target)
    first = np.floor(places).astype(np.intp)
    offset = places - first.astype(np.float32)
    distances = np.stack([offset + 1, offset, 1 - offset, 2 - offset])
    sources = np.clip(first + np.arange(-1, 3)[:, None], 0, count - 1)
    return Taps(sources, _cubic(distances, _CUBIC))


def _centers(scale: np.float32, target: int) -> Float32:
    half = np.float32(0.5)
    return (np.arange(target, dtype=np.float32) + half) * scale - half


def _nearest_indices(count: int, target: int) -> NDArray[np.intp]:
    scale = np.float32(count) / np.float32(target)
    indices = np.floor(np.arange(target, dtype=np.float32) * scale).astype(np.intp)
    bounded: NDArray[np.intp] = np.minimum(indices, count - 1)
    return bounded


@dataclass(frozen=True, slots=True)
class _Filter:
    """What a source pixel counts by its distance in target pixels, which is below `support`."""

    support: int
    weight: Callable[[Float32], Float32]


def _triangle(distance: Float32) -> Float32:
    return np.maximum(1 - distance, np.float32(0))


def _cubic(distance: Float32, a: float) -> Float32:
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * a
    return np.where(distance < 1, near, np.where(distance < 2, far, np.float32(0)))


_TRIANGLE = _Filter(1, _triangle)
_KEYS = _Filter(2, lambda distance: _cubic(distance, _CUBIC_ANTIALIASED))


def _antialiased(planes: Float32, size: Size, kernel: _Filter) -> Float32:
    height, width = planes.shape[-2:]
    if width != size[1]:
        planes = _along_last(planes, size[1], kernel)
    if height != size[0]:
        planes = np.swapaxes(_along_last(np.swapaxes(planes, -1, -2), size[0], kernel), -1, -2)
    return np.ascontiguousarray(planes)


def _along_last(planes: Float32, target: int, kernel: _Filter) -> Float32:
    """The last axis resampled: a sum over the taps that any target pixel has."""
    first, weights = _windows(planes.shape[-1], target, kernel)
    result = np.zeros((*planes.shape[:-1], target), np.float32)
    for tap in range(weights.shape[1]):
        sources = np.minimum(first + tap, planes.shape[-1] - 1)
        result += planes[..., sources] * weights[:, tap]
    return result


def _windows(count: int, target: int, kernel: _Filter) -> tuple[NDArray[np.intp], Float32]:
    """First source pixel [target] and weights [target, taps], zero where a pixel has fewer taps.

    In float32 as in PyTorch: at hundreds of pixels the centres' rounding is seen in the weights.
    """
    half = np.float32(0.5)
    scale = np.float32(count) / np.float32(target)
    stretch = max(scale, np.float32(1))
    width = stretch * np.float32(kernel.support)
    center = (np.arange(target, dtype=np.float32) + half) * scale
    first = np.maximum((center - width + half).astype(np.intp), 0)
    end = np.minimum((center + width + half).astype(np.intp), count)
    taps = first[:, None] + np.arange(int((end - first).max()))
    offset = taps.astype(np.float32) - center[:, None] + half
    weights = kernel.weight(np.abs(offset * (1 / stretch)))
    weights[taps >= end[:, None]] = 0
    return first, weights / weights.sum(axis=1, keepdims=True)

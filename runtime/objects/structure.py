"""From the occupancy decoder's logits to the voxels of the structured latent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32, Int32
from sam3d_gguf.runtime.objects.metadata import integer, number
from sam3d_gguf.runtime.objects.voxels import VoxelRows
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import InputError


@dataclass(frozen=True, slots=True)
class OccupancySettings:
    """Numbers of an `ss_decoder`.

    Attributes:
        threshold: logits above it are occupied.
        prune_distance: half the side, less the middle, of the full cubes whose middle is dropped.
        maximum_voxels: more of them are shrunk.
        downsample_factor: by this.
    """

    threshold: float
    prune_distance: int
    maximum_voxels: int
    downsample_factor: int

    @classmethod
    def of(cls, weights: Weights) -> Self:
        """The settings in an opened `ss_decoder`.

        Raises:
            ContractError: one is missing or of the wrong kind.
        """
        return cls(
            threshold=number(weights, "occupancy.threshold"),
            prune_distance=integer(weights, "occupancy.prune_distance"),
            maximum_voxels=integer(weights, "occupancy.maximum_voxels"),
            downsample_factor=integer(weights, "occupancy.downsample_factor"),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The voxels of an object, [N, 4] int32: batch, x, y, z, sorted.

    Attributes:
        occupied: all of them.
        surface: without those inside.
        coords: what the structured latent is sampled on.
        scale_factor: the pose's scale must be multiplied by it.
    """

    occupied: Int32
    surface: Int32
    coords: Int32
    scale_factor: int


def structure(logits: Float32, settings: OccupancySettings) -> Structure:
    """The voxels of [1, 1, X, Y, Z] logits.

    Raises:
        InputError: none is occupied.
    """
    every = occupied(logits, settings.threshold)
    if len(every) == 0:
        raise InputError(
            "the model found no object: no voxel is occupied",
            action="Give another mask or seed.",
        )
    outer = surface(every, settings.prune_distance) if settings.prune_distance else every
    coords, factor = shrunk(outer, settings.maximum_voxels, settings.downsample_factor)
    return Structure(every, outer, coords, factor)


def occupied(logits: Float32, threshold: float) -> Int32:
    """The voxels of [B, 1, X, Y, Z] logits above the threshold, x slowest, z fastest."""
    return np.argwhere(logits[:, 0] > threshold).astype(np.int32)


def surface(coords: Int32, distance: int) -> Int32:
    """The voxels that are not in the middle of a full cube of side 2 * distance + 1."""
    rows = VoxelRows(coords)
    inner = np.ones(len(coords), np.bool_)
    reach = range(-distance, distance + 1)
    for offset in ((x, y, z) for x in reach for y in reach for z in reach):
        inner &= rows.at(offset) < len(coords)
    return coords[~inner]


def shrunk(coords: Int32, maximum: int, factor: int) -> tuple[Int32, int]:
    """At most `maximum` voxels: if there are more, each axis shrinks about the middle by `factor`.

    A grid of side 64 in halves has at most 33^3 voxels, so once is enough for the official 42,000.

    Returns:
        The voxels, sorted, and what the object's scale must be multiplied by: 1 or `factor`.
    """
    if len(coords) <= maximum:
        return coords, 1
    places = coords[:, 1:].astype(np.float32)
    low, high = places.min(axis=0), places.max(axis=0)
    extent = high - low
    target = (extent + np.float32(1)) / np.float32(factor)
    start = low + (extent + np.float32(1) - target) / np.float32(2)
    part = (places - low) / np.maximum(extent, np.float32(1))
    moved = np.rint(part * (target - np.float32(1)) + start)
    moved = np.clip(moved, np.trunc(start), np.trunc(start + target - np.float32(1)))
    together = np.concatenate([coords[:, :1], moved.astype(np.int32)], axis=1)
    return np.unique(together, axis=0), factor

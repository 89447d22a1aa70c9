"""The camera that a pointmap was seen by: x left, y up, z forward; intrinsics in units of the
photo's width and height, as MoGe gives them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32, Float64


@dataclass(frozen=True, slots=True, eq=False)
class Camera:
    """A pinhole camera with its centre in the middle of the photo.

    Attributes:
        focal: in pixels.
        width, height: of the photo, in pixels.
        error: median distance, in pixels, of the pointmap's points from their own pixels; NaN where
            the camera was not found from them.
    """

    focal: float
    width: int
    height: int
    error: float

    @property
    def intrinsics(self) -> Float64:
        """[3, 3] in units of the photo's width and height."""
        return np.array(
            [[self.focal / self.width, 0, 0.5], [0, self.focal / self.height, 0.5], [0, 0, 1]]
        )

    def scaled(self, width: int, height: int) -> Camera:
        """The same view in another number of pixels."""
        return Camera(self.focal * width / self.width, width, height, self.error)

    def project(self, points: Float32) -> tuple[Float64, Float64]:
        """[M, 2] pixels, x right and y down, and [M] depths of points [M, 3].

        Those at or behind the camera have the pixel NaN.
        """
        wide = points.astype(np.float64)
        depth = wide[:, 2]
        ahead = np.where(depth > 0, depth, np.nan)
        pixels = wide[:, :2] / ahead[:, None] * -self.focal
        pixels += (self.width / 2, self.height / 2)
        return pixels, depth


def camera_of(points: Float32) -> Camera | None:
    """The camera whose rays are nearest, in the sense of least squares, to a pointmap's points.

    Each point's direction (x/z, y/z) times the focal length should be its pixel's place from the
    middle; square pixels.

    Args:
        points: [3, H, W], NaN where invalid.

    Returns:
        None where no point is ahead of the camera, or none is off its axis.
    """
    _, height, width = points.shape
    wide = points.astype(np.float64)
    with np.errstate(all="ignore"):
        ahead = np.where(wide[2] > 0, wide[2], np.nan)
        across, down = -wide[0] / ahead, -wide[1] / ahead
    columns = np.arange(width, dtype=np.float64) + (0.5 - width / 2)
    rows = np.arange(height, dtype=np.float64)[:, None] + (0.5 - height / 2)
    valid = np.isfinite(across) & np.isfinite(down)
    square = np.where(valid, across * across + down * down, 0).sum()
    if not square > 0 or not np.isfinite(square):
        return None
    focal = float(np.where(valid, across * columns + down * rows, 0).sum() / square)
    if not focal > 0:
        return None
    away = np.hypot(across * focal - columns, down * focal - rows)
    return Camera(focal, width, height, float(np.median(away[valid])))

"""Rays, the crop condition, and the perspective camera; lengths in metres, images in pixels.

Camera axes: x right, y down, z forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32, Float64
from sam3d_gguf.schemas.errors import InputError

MIN_FOCAL, MAX_PIXELS = 1.0, 1e7
"""Smallest focal length, and largest number in a camera matrix, pixels."""

HAND_SCALE_FACTOR = 10.0
"""Factor of the hand camera's scale in the official configuration."""


@dataclass(frozen=True, slots=True)
class Projection:
    """Points seen by the camera.

    Attributes:
        translation: [B, 3] `pred_cam_t`, metres, added to the points.
        points_2d: [B, N, 2] pixels of the photo.
        depth: [B, N] metres.
        focal_length: [B] fx, pixels.
    """

    translation: Float32
    points_2d: Float32
    depth: Float32
    focal_length: Float32


def default_intrinsics(width: int, height: int) -> Float32:
    """The [3, 3] matrix that the original assumes: focal length = the image's diagonal."""
    diagonal = float(height**2 + width**2) ** 0.5
    return np.array(
        [[diagonal, 0, width / 2.0], [0, diagonal, height / 2.0], [0, 0, 1]], np.float32
    )


def checked_intrinsics(matrix: Float64) -> Float32:
    """A [3, 3] float32 copy.

    Raises:
        InputError: wrong shape, not finite, a focal length below a pixel, or out of all bounds.
    """
    if matrix.shape != (3, 3):
        raise InputError(
            f"the matrix has the shape {list(matrix.shape)}", where="intrinsics", expected="3x3"
        )
    with np.errstate(over="ignore"):
        checked = matrix.astype(np.float32)
    if not np.isfinite(checked).all():
        raise InputError(
            "a value is not finite", where="intrinsics", expected="numbers that are finite"
        )
    focal = checked[0, 0], checked[1, 1]
    if not all(MIN_FOCAL <= length <= MAX_PIXELS for length in focal):
        raise InputError(
            f"the focal lengths are {focal[0]:g} and {focal[1]:g}",
            where="intrinsics",
            expected=f"pixels, {MIN_FOCAL:g} to {MAX_PIXELS:g}",
        )
    if np.abs(checked[:2]).max() > MAX_PIXELS or checked[2].tolist() != [0, 0, 1]:
        raise InputError(
            "the matrix is no camera's",
            where="intrinsics",
            expected=f"centre and skew up to {MAX_PIXELS:g} pixels, and 0, 0, 1 in the last row",
        )
    return checked


def pixel_rays(affine: Float32, intrinsics: Float32, size: tuple[int, int]) -> Float32:
    """The x and y at z = 1 of the ray through every crop pixel's index: [B, 2, H, W].

    Args:
        affine: [B, 2, 3] photo to crop.
        intrinsics: [3, 3].
        size: width, height of the crop.
    """
    rays = np.empty((len(affine), 2, size[1], size[0]), np.float32)
    grid = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    for axis in range(2):
        scale, shift = affine[:, axis, axis], affine[:, axis, 2]
        pixels = grid[axis].astype(np.float32)[None] / scale[:, None, None]
        photo = pixels - (shift / scale)[:, None, None]
        rays[:, axis] = (photo - intrinsics[axis, 2]) / intrinsics[axis, axis]
    return rays


def crop_condition(
    center: Float32, scale: Float32, photo_size: Float32, intrinsics: Float32, *, own_center: bool
) -> Float32:
    """CLIFF's condition: crop centre from the principal point and crop side, over fx: [B, 3].

    Args:
        center, scale, photo_size: [B, 2] of the crops.
        own_center: measure from the intrinsics' principal point, not from the photo's middle.
    """
    middle: Float32 = intrinsics[None, :2, 2] if own_center else photo_size / np.float32(2)
    offset: Float32 = center - middle
    values: Float32 = np.concatenate([offset, scale[:, :1]], axis=1)
    condition: Float32 = values / intrinsics[0, 0]
    return condition


def camera_translation(
    camera: Float32,
    center: Float32,
    side: Float32,
    photo_size: Float32,
    intrinsics: Float32,
    *,
    factor: float,
    own_center: bool,
) -> Float32:
    """Raw (s, tx, ty) to metres: s and ty change sign, depth = 2 fx / (side s factor + 1e-8).

    Args:
        camera: [B, 3].
        center: [B, 2] crop centres, pixels.
        side: [B] crop sides, pixels.
        photo_size: [B, 2] width, height.
        intrinsics: [B, 3, 3].
        factor: 1 for the body, 10 for a hand.
        own_center: as in `crop_condition`.
    """
    size: Float32 = side * -camera[:, 0] * np.float32(factor) + np.float32(1e-8)
    depth: Float32 = np.float32(2) * intrinsics[:, 0, 0] / size
    middle: Float32 = intrinsics[:, :2, 2] if own_center else photo_size / np.float32(2)
    shift: Float32 = np.float32(2) * (center - middle) / size[:, None]
    x: Float32 = camera[:, 1] + shift[:, 0]
    y: Float32 = -camera[:, 2] + shift[:, 1]
    return np.stack([x, y, depth], axis=-1)


def project(points: Float32, translation: Float32, intrinsics: Float32) -> Projection:
    """Project [B, N, 3] points moved by [B, 3] with the full [B, 3, 3] intrinsics.

    Raises:
        InputError: a point lies in the camera's plane, so that it has no image.
    """
    moved = points + translation[:, None]
    depth = moved[..., 2]
    if not depth.all():
        person, index = (int(i) for i in np.argwhere(depth == 0)[0])
        raise InputError(
            "a point lies in the camera's plane",
            where=f"crop {person}, point {index}",
            expected="a depth other than 0",
        )
    flat = moved / depth[..., None]
    image = np.einsum("bij,bkj->bki", intrinsics, flat)
    return Projection(
        translation=translation,
        points_2d=np.ascontiguousarray(image[..., :2], np.float32),
        depth=np.ascontiguousarray(depth),
        focal_length=intrinsics[:, 0, 0].copy(),
    )


def photo_to_crop(points: Float32, affine: Float32, size: Float32) -> Float32:
    """[B, N, 2] pixels of the photo to crop units, -0.5..0.5 inside the crop."""
    ones = np.ones_like(points[..., :1])
    moved = np.concatenate([points, ones], axis=-1) @ np.swapaxes(affine, -1, -2)
    return moved / size[:, None] - np.float32(0.5)

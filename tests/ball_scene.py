"""A photo of two balls on a floor with its masks and its pointmap, drawn by intersecting rays.

As a program: `ball_scene.py FOLDER` writes photo.png, mask.png, mask-2.png and points.npy.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[Any]
WIDTH, HEIGHT, FOCAL = 480, 360, 420.0
BALLS = (((0.35, -0.15, 3.0), 0.6, (0.85, 0.3, 0.2)), ((-0.75, -0.45, 2.6), 0.3, (0.2, 0.45, 0.85)))
"""Centre (x left, y up, z forward), radius, colour."""

FLOOR = -0.75
_LIGHT = np.array([0.5, 0.8, -0.4]) / np.linalg.norm([0.5, 0.8, -0.4])


@dataclass(frozen=True)
class Scene:
    """What a camera sees.

    Attributes:
        photo: [H, W, 3] uint8; masks: [2, H, W] bool.
        points: [H, W, 3] float32, x left, y up, z forward; infinite in the sky.
    """

    photo: Array
    masks: Array
    points: Array


def scene(width: int = WIDTH, height: int = HEIGHT) -> Scene:
    """The scene in so many pixels."""
    focal = FOCAL * width / WIDTH
    columns, rows = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    rays = np.stack(
        [(width / 2 - columns) / focal, (height / 2 - rows) / focal, np.ones_like(rows)], axis=-1
    )
    with np.errstate(divide="ignore"):
        distance = np.where(rays[..., 1] < 0, FLOOR / rays[..., 1], np.inf)
    squares = np.where(np.isfinite(distance), distance, 0)[..., None] * rays
    checks = (np.floor(2 * squares[..., 0]) + np.floor(2 * squares[..., 2])) % 2
    color = np.where(checks[..., None] > 0, 0.75, 0.55) * np.ones(3)
    color[~np.isfinite(distance)] = (0.6, 0.75, 0.95)
    masks = np.zeros((len(BALLS), height, width), np.bool_)
    for number, (centre, radius, paint) in enumerate(BALLS):
        along = rays @ centre / (rays * rays).sum(axis=-1)
        apart = radius**2 - ((rays * along[..., None] - centre) ** 2).sum(axis=-1)
        depth = along - np.sqrt(np.maximum(apart, 0) / (rays * rays).sum(axis=-1))
        hit = (apart > 0) & (depth < distance)
        normal = (rays * depth[..., None] - centre) / radius
        shade = 0.35 + 0.65 * np.maximum(normal @ _LIGHT, 0)
        color[hit] = shade[hit][:, None] * paint
        distance = np.where(hit, depth, distance)
        masks[:, hit] = False
        masks[number] = hit
    points = rays * np.where(np.isfinite(distance), distance, 1)[..., None]
    points[~np.isfinite(distance)] = np.inf
    return Scene(np.rint(color * 255).astype(np.uint8), masks, points.astype(np.float32))


def write(folder: Path) -> None:
    """Write the scene's files; the pointmap at a quarter of the photo's size."""
    folder.mkdir(parents=True, exist_ok=True)
    found = scene()
    Image.fromarray(found.photo).save(folder / "photo.png")
    for name, mask in zip(("mask.png", "mask-2.png"), found.masks, strict=True):
        Image.fromarray(mask.astype(np.uint8) * 255).save(folder / name)
    np.save(folder / "points.npy", scene(WIDTH // 4, HEIGHT // 4).points)


if __name__ == "__main__":
    write(Path(sys.argv[1]))

"""Objects of a scene as the camera sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.export.raster import rasterize
from sam3d_gguf.runtime.geometry.arrays import Bool, Float32, Int32, Uint8
from sam3d_gguf.runtime.objects.camera import Camera
from sam3d_gguf.runtime.objects.mesh import Mesh
from sam3d_gguf.runtime.objects.placement import placed
from sam3d_gguf.runtime.objects.pose import Pose
from sam3d_gguf.runtime.objects.resize import nearest

LIMIT = 1024
"""Pixels of the longer side of what is drawn."""

_SHADE = 0.4
"""How much darker a surface is that is seen from its edge."""


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """A mesh in the camera's space.

    Attributes:
        vertices: [V, 3]; faces: [F, 3]; colors: [V, 3] in 0..1.
    """

    vertices: Float32
    faces: Int32
    colors: Float32

    @classmethod
    def of(cls, mesh: Mesh, pose: Pose) -> Surface:
        """An object's mesh where its pose puts it."""
        return cls(placed(mesh.vertices, pose), mesh.faces, mesh.attributes[:, :3])


def drawn_size(width: int, height: int) -> tuple[int, int]:
    """Width and height of what is drawn of a photo."""
    longer = max(width, height)
    if longer <= LIMIT:
        return width, height
    return max(width * LIMIT // longer, 1), max(height * LIMIT // longer, 1)


def resized_mask(mask: Uint8, width: int, height: int) -> Bool:
    """[height, width] of a mask [H, W], nearest."""
    marked: Bool = nearest(mask[None], (height, width))[0] > 0
    return marked


def silhouette(surface: Surface, camera: Camera) -> Bool:
    """[H, W] the pixels that the surface covers, whatever else there may be before it."""
    pixels, depth = camera.project(surface.vertices)
    return rasterize(pixels, depth, surface.faces, camera.width, camera.height) >= 0


def overlap(first: Bool, second: Bool) -> float:
    """Intersection over union of two masks of one size; 0 where both are empty."""
    union = int((first | second).sum())
    return int((first & second).sum()) / union if union else 0.0


def rendered(surfaces: Sequence[Surface], camera: Camera, behind: Uint8) -> Uint8:
    """[H, W, 3]: the surfaces in their own colours, lit from the camera, before a picture."""
    image = behind.copy()
    if not surfaces:
        return image
    starts = np.cumsum([0, *(len(each.vertices) for each in surfaces[:-1])])
    vertices = np.concatenate([each.vertices for each in surfaces])
    colors = np.concatenate([each.colors for each in surfaces])
    faces = np.concatenate(
        [each.faces + np.int32(start) for each, start in zip(surfaces, starts, strict=True)]
    )
    pixels, depth = camera.project(vertices)
    seen = rasterize(pixels, depth, faces, camera.width, camera.height)
    shown = seen >= 0
    triangles = faces[seen[shown]]
    a, b, c = (vertices[triangles[:, corner]] for corner in range(3))
    normal, ray = np.cross(b - a, c - a), (a + b + c) / np.float32(3)
    length = np.linalg.norm(normal, axis=1) * np.linalg.norm(ray, axis=1)
    facing = np.abs((normal * ray).sum(axis=1)) / np.maximum(length, np.float32(1e-30))
    light = np.float32(1 - _SHADE) + np.float32(_SHADE) * facing
    shade = colors[triangles].mean(axis=1) * light[:, None]
    image[shown] = np.rint(np.clip(shade, 0, 1) * 255).astype(np.uint8)
    return image

"""Draw the meshes and keypoints over the photo."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageDraw

from sam3d_gguf.runtime.export.surface import signed_volume, vertex_normals
from sam3d_gguf.runtime.geometry.arrays import Bool, Float32, Int32, Uint8
from sam3d_gguf.runtime.vocabulary import keypoint_links

_COLORS = ((196, 160, 110), (110, 150, 196), (140, 190, 120), (190, 130, 180))
_OPACITY = 0.75
_NEAREST = 0.05
"""Depth, metres, in front of which nothing is drawn."""


def overlay(
    photo: Uint8, vertices: Float32, faces: Int32, keypoints: Float32, intrinsics: Float32
) -> bytes:
    """A PNG of the photo with shaded meshes and keypoint skeletons.

    Args:
        photo: [H, W, 3] uint8 RGB.
        vertices: [N, V, 3] in camera space, metres, z forward.
        faces: [F, 3].
        keypoints: [N, 70, 2] pixels.
        intrinsics: [3, 3].
    """
    drawn = Image.fromarray(photo)
    layer = drawn.copy()
    pencil = ImageDraw.Draw(layer)
    order = np.argsort(-vertices[..., 2].mean(axis=1))
    for person in order.tolist():
        color = np.array(_COLORS[person % len(_COLORS)], np.float32)
        _draw_mesh(pencil, vertices[person], faces, intrinsics, color)
    drawn = Image.blend(drawn, layer, _OPACITY)
    pencil = ImageDraw.Draw(drawn)
    width = max(1, round(max(photo.shape[:2]) / 400))
    for points in keypoints:
        _draw_keypoints(pencil, points, width, photo.shape[1], photo.shape[0])
    stream = io.BytesIO()
    drawn.save(stream, "PNG")
    return stream.getvalue()


def _draw_mesh(
    pencil: ImageDraw.ImageDraw,
    vertices: Float32,
    faces: Int32,
    intrinsics: Float32,
    color: Float32,
) -> None:
    depth = vertices[:, 2]
    front = np.maximum(depth, np.float32(_NEAREST))
    focal = np.stack([intrinsics[0, 0], intrinsics[1, 1]]).astype(np.float32)
    flat = np.divide(vertices[:, :2], front[:, None], dtype=np.float32)
    image = np.add(flat * focal, intrinsics[:2, 2], dtype=np.float32)
    normals = vertex_normals(vertices, faces)[faces].mean(axis=1)
    order = np.argsort(-depth[faces].mean(axis=1))
    outward = 1 if signed_volume(vertices, faces) >= 0 else -1
    shown = order[_facing(image[faces], depth[faces], outward)[order]]
    shade = np.clip(0.25 + 0.75 * np.abs(normals[shown, 2]), 0, 1)
    fills = (shade[:, None] * color).astype(np.uint8)
    corners = image[faces[shown]].reshape(-1, 6)
    for polygon, fill in zip(corners.tolist(), fills.tolist(), strict=True):
        pencil.polygon(polygon, fill=tuple(fill))


def _facing(triangles: Float32, depth: Float32, outward: int) -> Bool:
    """Triangles [F, 3, 2] that are in front of the camera and seen from outside.

    Args:
        outward: 1 where the mesh winds counter-clockwise seen from outside, -1 if clockwise.
    """
    sides = (triangles[:, 1:] - triangles[:, :1]).astype(np.float64)
    first, second = sides[:, 0], sides[:, 1]
    turn = first[:, 0] * second[:, 1] - first[:, 1] * second[:, 0]
    facing: Bool = (turn * outward < 0) & (depth > _NEAREST).all(axis=1)
    return facing


def _draw_keypoints(
    pencil: ImageDraw.ImageDraw, points: Float32, width: int, columns: int, rows: int
) -> None:
    limit = 4 * max(columns, rows)
    near = np.abs(points).max(axis=1) < limit
    for first, second in keypoint_links():
        if near[first] and near[second]:
            line = [*points[first].tolist(), *points[second].tolist()]
            pencil.line(line, fill=(255, 255, 255), width=width)
    for x, y in points[near].tolist():
        pencil.ellipse([x - width, y - width, x + width, y + width], fill=(220, 40, 40))

"""Surfaces for exporters: normals, and vertices split where the texture has a seam."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32, Int32
from sam3d_gguf.runtime.geometry.mhr_rig import MhrRig


@dataclass(frozen=True, slots=True, eq=False)
class SplitSurface:
    """A mesh with one texture coordinate per vertex.

    Attributes:
        vertices: [M] index of each split vertex's original.
        coordinates: [M, 2] texture coordinates, v upwards.
        faces: [F, 3] triangles over the split vertices.
    """

    vertices: Int32
    coordinates: Float32
    faces: Int32


def split_at_seams(rig: MhrRig) -> SplitSurface:
    """One vertex for every pair of a vertex and a texture coordinate that a triangle uses."""
    count = len(rig.texture_coordinates)
    corners = rig.faces.reshape(-1).astype(np.int64) * count + rig.texture_faces.reshape(-1)
    pairs, places = np.unique(corners, return_inverse=True)
    return SplitSurface(
        vertices=(pairs // count).astype(np.int32),
        coordinates=np.ascontiguousarray(rig.texture_coordinates[pairs % count]),
        faces=places.reshape(-1, 3).astype(np.int32),
    )


def vertex_normals(vertices: Float32, faces: Int32) -> Float32:
    """Unit normals [V, 3], triangles weighted by area; (0, 0, 1) where there is no surface."""
    a, b, c = (vertices[faces[:, corner]].astype(np.float64) for corner in range(3))
    weighted = np.cross(b - a, c - a)
    normals = np.zeros((len(vertices), 3))
    for axis in range(3):
        per_face = np.repeat(weighted[:, axis], 3)
        normals[:, axis] = np.bincount(faces.reshape(-1), per_face, len(vertices))
    length = np.sqrt((normals * normals).sum(axis=1, keepdims=True))
    up = np.array([0.0, 0.0, 1.0])
    unit = np.where(length > 0, normals / np.where(length > 0, length, 1), up)
    return unit.astype(np.float32)


def signed_volume(vertices: Float32, faces: Int32) -> float:
    """Volume of a closed mesh; negative where it winds clockwise seen from outside."""
    centred = vertices.astype(np.float64) - vertices.mean(axis=0, dtype=np.float64)
    a, b, c = (centred[faces[:, corner]] for corner in range(3))
    return float((a * np.cross(b, c)).sum() / 6)

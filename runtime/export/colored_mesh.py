"""Binary glTF 2.0 of meshes with a colour at every vertex."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.export.gltf_container import (
    ARRAY_BUFFER,
    ELEMENT_BUFFER,
    GltfBuilder,
    Json,
    container,
)
from sam3d_gguf.runtime.export.surface import vertex_normals
from sam3d_gguf.runtime.geometry.arrays import Float32, Int32, Uint8


@dataclass(frozen=True, slots=True, eq=False)
class ColoredMesh:
    """A surface.

    Attributes:
        name: of its node.
        vertices: [V, 3] float32, y up; at least one.
        faces: [F, 3] int32, counter-clockwise from outside; at least one.
        colors: [V, 3] float32, red, green, blue in 0..1.
    """

    name: str
    vertices: Float32
    faces: Int32
    colors: Float32


def y_up(points: Float32) -> Float32:
    """[V, 3] of an object, whose z is up, in the axes of the file: x, z, -y."""
    return np.stack([points[:, 0], points[:, 2], -points[:, 1]], axis=-1)


def colored_glb(meshes: Sequence[ColoredMesh]) -> bytes:
    """The bytes of a .glb file with a node for each mesh.

    Colours are written as they are, in 8 bits, as the original writes them; glTF calls them linear.
    """
    builder = GltfBuilder()
    material: Json = {
        "doubleSided": True,
        "pbrMetallicRoughness": {"metallicFactor": 0.0, "roughnessFactor": 1.0},
    }
    document: Json = {
        "asset": {"version": "2.0", "generator": "sam3d-gguf"},
        "scene": 0,
        "scenes": [{"nodes": [*range(len(meshes))]}],
        "nodes": [{"name": mesh.name, "mesh": index} for index, mesh in enumerate(meshes)],
        "meshes": [_mesh(builder, mesh) for mesh in meshes],
        "materials": [material],
    }
    return container(document, builder)


def _mesh(builder: GltfBuilder, mesh: ColoredMesh) -> Json:
    normals = vertex_normals(mesh.vertices, mesh.faces)
    indices = mesh.faces.reshape(-1).astype(np.uint32)
    attributes = {
        "POSITION": builder.add(mesh.vertices, target=ARRAY_BUFFER, bounds=True),
        "NORMAL": builder.add(normals, target=ARRAY_BUFFER),
        "COLOR_0": builder.add(_opaque(mesh.colors), target=ARRAY_BUFFER, fractions=True),
    }
    return {
        "name": mesh.name,
        "primitives": [
            {
                "attributes": attributes,
                "indices": builder.add(indices, target=ELEMENT_BUFFER),
                "material": 0,
            }
        ],
    }


def _opaque(colors: Float32) -> Uint8:
    """[V, 4] in 8 bits."""
    result = np.full((len(colors), 4), 255, np.uint8)
    result[:, :3] = np.rint(np.clip(colors, 0, 1) * 255)
    return result

"""Binary glTF 2.0: every person as a skinned mesh on a named, posed skeleton.

Axes are glTF's own (y up, z towards the viewer), which are MHR's; lengths are metres. A person
stands where the camera saw them, the camera being at the origin and looking along -z.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.export.gltf_container import (
    ARRAY_BUFFER,
    ELEMENT_BUFFER,
    GltfBuilder,
    Json,
    container,
)
from sam3d_gguf.runtime.export.influences import influence_sets
from sam3d_gguf.runtime.export.surface import SplitSurface, split_at_seams, vertex_normals
from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.geometry.mhr_rig import MhrRig
from sam3d_gguf.runtime.geometry.rotations import matrix_from_quaternion, normalized

_METRE = np.float32(0.01)
_SKIN_COLOR = [0.8, 0.68, 0.6, 1.0]


@dataclass(frozen=True, slots=True, eq=False)
class GltfPerson:
    """One person: rest vertices [V, 3] cm, local joint states [127, 8] cm, `pred_cam_t` [3] m."""

    rest: Float32
    local: Float32
    translation: Float32


def glb(rig: MhrRig, people: list[GltfPerson]) -> bytes:
    """The bytes of a .glb file with every person posed and skinned."""
    builder = GltfBuilder()
    surface = split_at_seams(rig)
    shared = _shared_accessors(builder, rig, surface)
    document: Json = {
        "asset": {"version": "2.0", "generator": "sam3d-gguf"},
        "scene": 0,
        "scenes": [{"nodes": []}],
        "nodes": [],
        "meshes": [],
        "skins": [],
        "materials": [
            {
                "name": "skin",
                "doubleSided": True,
                "pbrMetallicRoughness": {
                    "baseColorFactor": _SKIN_COLOR,
                    "metallicFactor": 0.0,
                    "roughnessFactor": 0.8,
                },
            }
        ],
    }
    for index, person in enumerate(people):
        _add_person(document, builder, rig, surface, shared, index, person)
    return container(document, builder)


def _shared_accessors(builder: GltfBuilder, rig: MhrRig, surface: SplitSurface) -> Json:
    """Accessors that all people use: texture, skin weights, triangles, bind matrices."""
    sets = influence_sets(rig.skinning)
    upright = surface.coordinates.copy()
    upright[:, 1] = 1 - upright[:, 1]
    attributes: Json = {"TEXCOORD_0": builder.add(upright, target=ARRAY_BUFFER)}
    for index, (joints, weights) in enumerate(zip(sets.joints, sets.weights, strict=True)):
        attributes[f"JOINTS_{index}"] = builder.add(joints[surface.vertices], target=ARRAY_BUFFER)
        attributes[f"WEIGHTS_{index}"] = builder.add(weights[surface.vertices], target=ARRAY_BUFFER)
    indices = surface.faces.reshape(-1).astype(np.uint32)
    return {
        "attributes": attributes,
        "indices": builder.add(indices, target=ELEMENT_BUFFER),
        "inverseBindMatrices": builder.add(_bind_matrices(rig)),
    }


def _bind_matrices(rig: MhrRig) -> Float32:
    """[J, 16] column-major inverse bind matrices, metres."""
    bind = rig.inverse_bind
    matrices = np.zeros((len(bind), 4, 4), np.float32)
    rotation = matrix_from_quaternion(normalized(bind[:, 3:7]))
    matrices[:, :3, :3] = rotation * bind[:, 7, None, None]
    matrices[:, :3, 3] = bind[:, :3] * _METRE
    matrices[:, 3, 3] = 1
    return np.ascontiguousarray(matrices.transpose(0, 2, 1)).reshape(-1, 16)


def _add_person(
    document: Json,
    builder: GltfBuilder,
    rig: MhrRig,
    surface: SplitSurface,
    shared: Json,
    index: int,
    person: GltfPerson,
) -> None:
    rest = person.rest * _METRE
    normals = vertex_normals(rest, rig.faces)[surface.vertices]
    positions = rest[surface.vertices]
    attributes = {
        "POSITION": builder.add(positions, target=ARRAY_BUFFER, bounds=True),
        "NORMAL": builder.add(normals, target=ARRAY_BUFFER),
        **shared["attributes"],
    }
    primitive = {"attributes": attributes, "indices": shared["indices"], "material": 0}
    meshes: list[Json] = document["meshes"]
    meshes.append({"name": f"person_{index}", "primitives": [primitive]})
    nodes: list[Json] = document["nodes"]
    first = len(nodes)
    nodes += _joint_nodes(rig, person.local, first)
    roots = [first + joint for joint, parent in enumerate(rig.parents.tolist()) if parent < 0]
    skins: list[Json] = document["skins"]
    skins.append(
        {
            "name": f"skeleton_{index}",
            "joints": list(range(first, first + len(rig.parents))),
            "skeleton": roots[0],
            "inverseBindMatrices": shared["inverseBindMatrices"],
        }
    )
    nodes.append({"name": f"mesh_{index}", "mesh": index, "skin": index})
    x, y, z = (float(value) for value in person.translation)
    scene: list[int] = document["scenes"][0]["nodes"]
    scene += [len(nodes), len(nodes) - 1]
    nodes.append({"name": f"person_{index}", "translation": [x, -y, -z], "children": roots})


def _joint_nodes(rig: MhrRig, local: Float32, first: int) -> list[Json]:
    children: list[list[int]] = [[] for _ in rig.parents]
    parents: list[int] = rig.parents.tolist()
    for joint, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(first + joint)
    turns = normalized(local[:, 3:7])
    nodes: list[Json] = []
    for joint, name in enumerate(rig.joint_names):
        node: Json = {
            "name": name,
            "translation": (local[joint, :3] * _METRE).tolist(),
            "rotation": turns[joint].tolist(),
            "scale": [float(local[joint, 7])] * 3,
        }
        if children[joint]:
            node["children"] = children[joint]
        nodes.append(node)
    return nodes

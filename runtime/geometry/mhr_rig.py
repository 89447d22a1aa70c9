"""MHR's skeleton and its skinning matrices; centimetres, radians, quaternions XYZW.

A skeleton state is [..., 8]: translation 3, quaternion 4, scale 1. The arithmetic follows
pymomentum's torch backend: local states in float32, forward kinematics in float64.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32, Float64, Int32, cross
from sam3d_gguf.runtime.geometry.rotations import (
    matrix_columns_from_xyz,
    matrix_from_quaternion,
    normalized,
    quaternion_product,
)
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import ContractError

PARAMETERS_PER_JOINT = 7
FIRST_POSED_JOINT = 2
"""Joints before it, the world and the root, have no pose corrective."""

_LN2 = np.float32(0.6931471824645996)


@dataclass(frozen=True, slots=True, eq=False)
class Skinning:
    """Influences grouped by vertex.

    Attributes:
        vertices: [M], the vertices that have influences, ascending.
        starts: [M], position of each one's first influence.
        joints, weights: [K] in vertex order.
        count: V, vertices in all.
    """

    vertices: Int32
    starts: Int32
    joints: Int32
    weights: Float32
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class MhrRig:
    """The fixed part of MHR's rig.

    Attributes:
        offsets: [J, 3] joint translations, cm.
        prerotations: [J, 4].
        parents: [J]; the root's is -1.
        groups: (joints, ancestors) of each level of the prefix scan.
        inverse_bind: [J, 8].
        faces: [F, 3]; texture_coordinates: [T, 2]; texture_faces: [F, 3].
        joint_names: J names.
    """

    offsets: Float32
    prerotations: Float32
    parents: Int32
    groups: tuple[tuple[Int32, Int32], ...]
    inverse_bind: Float32
    skinning: Skinning
    faces: Int32
    texture_coordinates: Float32
    texture_faces: Int32
    joint_names: tuple[str, ...]


def load_rig(weights: Weights) -> MhrRig:
    """The rig in an opened MHR file.

    Raises:
        ContractError: metadata is missing, or the prefix sizes do not cover the prefix table.
    """
    prefix = weights.array("skeleton.prefix").astype(np.int32)
    sizes = [int(size) for size in _listed(weights, "prefix_sizes")]
    if sum(sizes) != prefix.shape[1]:
        raise ContractError(
            "sam3d.mhr.prefix_sizes do not add up",
            where=str(weights.path),
            expected=f"a sum of {prefix.shape[1]}",
        )
    bounds = np.cumsum([0, *sizes])
    groups = tuple(
        (prefix[0, start:end], prefix[1, start:end]) for start, end in itertools.pairwise(bounds)
    )
    return MhrRig(
        offsets=weights.array("skeleton.offsets"),
        prerotations=weights.array("skeleton.prerotations"),
        parents=weights.array("skeleton.parents").astype(np.int32),
        groups=groups,
        inverse_bind=weights.array("skin.inverse_bind"),
        skinning=group_influences(
            weights.array("skin.vertices"),
            weights.array("skin.joints"),
            weights.array("skin.weights"),
            weights.tensor("identity.base").shape[0],
        ),
        faces=weights.array("mesh.faces").astype(np.int32),
        texture_coordinates=weights.array("mesh.texcoords"),
        texture_faces=weights.array("mesh.texcoord_faces").astype(np.int32),
        joint_names=tuple(str(name) for name in _listed(weights, "joint_names")),
    )


def _listed(weights: Weights, key: str) -> list[Any]:
    found: list[Any] | None = weights.metadata.get(f"sam3d.mhr.{key}")
    if found is None:
        raise ContractError(f"the metadata key sam3d.mhr.{key} is missing", where=str(weights.path))
    return found


def group_influences(vertices: Int32, joints: Int32, weights: Float32, count: int) -> Skinning:
    """Sort [K] influences by vertex, keeping their order within a vertex."""
    order = np.argsort(vertices, kind="stable")
    present, starts = np.unique(vertices[order], return_index=True)
    return Skinning(
        vertices=present.astype(np.int32),
        starts=starts.astype(np.int32),
        joints=joints[order].astype(np.int32),
        weights=weights[order].astype(np.float32),
        count=count,
    )


def local_states(rig: MhrRig, joint_parameters: Float32) -> Float32:
    """[B, 7 J] joint parameters to local skeleton states [B, J, 8], float32.

    Per joint: translation 3 added to its offset, Euler angles with R = Rz Ry Rx after the
    prerotation, log2 of the scale.
    """
    values = joint_parameters.reshape(len(joint_parameters), -1, PARAMETERS_PER_JOINT)
    half = values[..., 3:6] * np.float32(0.5)
    sx, sy, sz = (np.sin(half[..., index]) for index in range(3))
    cx, cy, cz = (np.cos(half[..., index]) for index in range(3))
    turn = np.stack(
        [
            cz * cy * sx - sz * sy * cx,
            cz * sy * cx + sz * cy * sx,
            sz * cy * cx - cz * sy * sx,
            cz * cy * cx + sz * sy * sx,
        ],
        axis=-1,
    )
    states = np.empty((*values.shape[:2], 8), np.float32)
    states[..., :3] = values[..., :3] + rig.offsets
    states[..., 3:7] = quaternion_product(np.broadcast_to(rig.prerotations, turn.shape), turn)
    states[..., 7] = np.exp(_LN2 * values[..., 6])
    return states


def global_states(rig: MhrRig, local: Float32) -> Float32:
    """[B, J, 8] local to global states: the prefix scan in float64, then cast to float32."""
    states = local.astype(np.float64)
    for joints, ancestors in rig.groups:
        states[:, joints] = _composed(states[:, ancestors], states[:, joints])
    return states.astype(np.float32)


def _composed(left: Float64, right: Float64) -> Float64:
    lq, rq = (_unit(state[..., 3:7]) for state in (left, right))
    axis, scalar = lq[..., :3], lq[..., 3:]
    moved = right[..., :3]
    side = cross(axis, moved)
    turned = moved + 2 * (side * scalar + cross(axis, side))
    result = np.empty_like(right)
    result[..., :3] = left[..., :3] + left[..., 7:] * turned
    vector = scalar * rq[..., :3] + rq[..., 3:] * axis + cross(axis, rq[..., :3])
    result[..., 3:6] = vector
    result[..., 6] = scalar[..., 0] * rq[..., 3] - (axis * rq[..., :3]).sum(axis=-1)
    result[..., 7] = left[..., 7] * right[..., 7]
    return result


def _unit(quaternion: Float64) -> Float64:
    norm = np.sqrt((quaternion * quaternion).sum(axis=-1, keepdims=True))
    unit: Float64 = quaternion / np.maximum(norm, 1e-12)
    return unit


def pose_features(joint_parameters: Float32) -> Float32:
    """[B, 7 J] to the pose correctives' input [B, 6 (J - 2)]: two matrix columns minus identity.

    Euler angles are those before the prerotation; a joint at rest gives zeros.
    """
    values = joint_parameters.reshape(len(joint_parameters), -1, PARAMETERS_PER_JOINT)
    features = matrix_columns_from_xyz(values[:, FIRST_POSED_JOINT:, 3:6])
    features[..., [0, 4]] -= np.float32(1)
    return features.reshape(len(features), -1)


def skin_matrices(inverse_bind: Float32, states: Float32) -> Float32:
    """[B, J, 8] global states to [B, J, 3, 4] matrices from the rest pose to the posed one."""
    pose, bind = states.astype(np.float64), inverse_bind.astype(np.float64)
    joined = _composed(pose, np.broadcast_to(bind, pose.shape)).astype(np.float32)
    matrices = np.empty((*joined.shape[:2], 3, 4), np.float32)
    rotation = matrix_from_quaternion(normalized(joined[..., 3:7]))
    matrices[..., :3] = rotation * joined[..., 7, None, None]
    matrices[..., 3] = joined[..., :3]
    return matrices

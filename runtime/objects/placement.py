"""Put objects into the scene of their photo: each has the same axes, its pose says where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.geometry.rotations import (
    matrix_from_quaternion,
    normalized,
    quaternion_product,
)
from sam3d_gguf.runtime.objects.gaussians import GaussianCloud
from sam3d_gguf.runtime.objects.pose import Pose

_LEAST = 1.1
"""A scale in the scene is at least this times the object's minimum."""


@dataclass(frozen=True, slots=True, eq=False)
class PosedCloud:
    """An object's Gaussians and where they are.

    Attributes:
        cloud: in the object's space.
        minimum_size: of the decoder, in the object's space.
        pose: of the object.
    """

    cloud: GaussianCloud
    minimum_size: float
    pose: Pose


def placed(points: Float32, pose: Pose) -> Float32:
    """[M, 3] points of an object in the scene."""
    result = turned(points * pose.scale, pose)
    result += pose.translation
    return result


def turned(directions: Float32, pose: Pose) -> Float32:
    """[M, 3] directions of an object in the scene, such as its normals."""
    matrix = matrix_from_quaternion(_vector_first(pose.rotation))[0]
    result: Float32 = np.matmul(directions, matrix)
    return result


def scene(objects: Sequence[PosedCloud]) -> GaussianCloud:
    """All Gaussians of several objects of one photo, as the original's `make_scene`.

    What an object's minimum has added to its scales is replaced by the scene's, the smallest of
    all.
    """
    minimums = [item.minimum_size * float(item.pose.scale[0, 0]) for item in objects]
    clouds = [
        _placed_cloud(item, own, min(minimums)) for item, own in zip(objects, minimums, strict=True)
    ]
    return GaussianCloud(
        positions=np.concatenate([cloud.positions for cloud in clouds]),
        features=np.concatenate([cloud.features for cloud in clouds]),
        logits=np.concatenate([cloud.logits for cloud in clouds]),
        scales=np.concatenate([cloud.scales for cloud in clouds]),
        turns=np.concatenate([cloud.turns for cloud in clouds]),
    )


def _placed_cloud(item: PosedCloud, own: float, shared: float) -> GaussianCloud:
    cloud, pose = item.cloud, item.pose
    scales = np.maximum(cloud.scales * pose.scale, np.float32(own * _LEAST))
    replaced: Float32 = scales * scales
    replaced += np.float32(shared**2 - own**2)
    back = np.concatenate([-_vector_first(pose.rotation)[:, :3], pose.rotation[:, :1]], axis=1)
    turns = quaternion_product(back, _vector_first(normalized(cloud.turns)))
    return GaussianCloud(
        positions=placed(cloud.positions, pose),
        features=cloud.features,
        logits=cloud.logits,
        scales=np.sqrt(replaced),
        turns=turns[:, [3, 0, 1, 2]],
    )


def _vector_first(quaternions: Float32) -> Float32:
    """w, x, y, z to x, y, z, w."""
    vector, real = quaternions[:, 1:], quaternions[:, :1]
    return np.concatenate([vector, real], axis=1)

"""Skin influences as glTF wants them: sets of four joints and weights per vertex."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.geometry.mhr_rig import Skinning

SET_SIZE = 4


@dataclass(frozen=True, slots=True, eq=False)
class InfluenceSets:
    """S sets of four influences for V vertices.

    Attributes:
        joints: [S, V, 4] uint16, 0 where the weight is 0.
        weights: [S, V, 4], each vertex's weights adding up to 1.
    """

    joints: NDArray[np.uint16]
    weights: Float32


def influence_sets(skinning: Skinning) -> InfluenceSets:
    """Group the influences by vertex, heaviest first, and normalise their weights.

    MHR's own weights miss 1 by what was dropped under 1e-5; glTF demands 1. A vertex without
    influence follows joint 0.
    """
    owner = np.repeat(skinning.vertices, np.diff([*skinning.starts, len(skinning.joints)]))
    order = np.lexsort((-skinning.weights, owner))
    owner, joints, weights = owner[order], skinning.joints[order], skinning.weights[order]
    slot = np.arange(len(owner)) - np.repeat(
        skinning.starts, np.diff([*skinning.starts, len(owner)])
    )
    sets = max(1, -(-(int(slot.max()) + 1) // SET_SIZE))
    all_joints = np.zeros((skinning.count, sets * SET_SIZE), np.uint16)
    all_weights = np.zeros((skinning.count, sets * SET_SIZE), np.float64)
    all_joints[owner, slot] = np.where(weights > 0, joints, 0)
    all_weights[owner, slot] = weights
    total = all_weights.sum(axis=1, keepdims=True)
    all_weights[total[:, 0] == 0, 0] = 1
    normalized = (all_weights / np.where(total > 0, total, 1)).astype(np.float32)
    shape = (skinning.count, sets, SET_SIZE)
    return InfluenceSets(
        joints=np.ascontiguousarray(all_joints.reshape(shape).transpose(1, 0, 2)),
        weights=np.ascontiguousarray(normalized.reshape(shape).transpose(1, 0, 2)),
    )

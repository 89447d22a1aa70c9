"""The continuous pose values of the heads, and the MHR model parameters they stand for.

Index tables are those of the original's `mhr_utils.py`: MHR pose parameters 6..138, counted
from 0 here; 124..129 are translations, the rest are radians.
"""

from __future__ import annotations

import numpy as np

from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.runtime.geometry.rotations import matrix_columns_from_xyz, xyz_from_6d

BODY_POSE = 133
BODY_CONTINUOUS = 260
HAND_POSE = 27
HAND_CONTINUOUS = 54
HAND_PARAMETERS = slice(62, 116)
JAW_PARAMETERS = slice(130, 133)

_BODY_THREE = np.array(
    [
        *(0, 2, 4, 6, 8, 10),
        *range(12, 30),
        *range(34, 40),
        *(44, 45, 46, 53, 54, 55, 64, 65, 66),
        *(85, 69, 73, 86, 70, 79, 87, 71, 82, 88, 72, 76, 91, 92, 93),
        *(112, 96, 100, 113, 97, 106, 114, 98, 109, 115, 99, 103),
        *(130, 131, 132),
    ]
)
_BODY_TRANSLATIONS = np.arange(124, 130)
_BODY_ONE = np.array(
    sorted(set(range(BODY_POSE)) - set(_BODY_THREE.tolist()) - set(range(124, 130)))
)
_HAND_FREEDOM = (3, 1, 1, 3, 1, 1, 3, 1, 1, 3, 1, 1, 2, 3, 1, 1)
_HAND_IS_THREE = np.repeat([count == 3 for count in _HAND_FREEDOM], _HAND_FREEDOM)
_HAND_CONTINUOUS_IS_THREE = np.repeat(_HAND_IS_THREE, 2)


def _angles(pairs: Float32) -> Float32:
    """[..., 2n] (sin, cos) pairs to [..., n]; atan2(0, 0) is 0."""
    return np.arctan2(pairs[..., 0::2], pairs[..., 1::2])


def _pairs(angles: Float32) -> Float32:
    pairs = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    return pairs.reshape(*angles.shape[:-1], -1)


def body_pose(continuous: Float32) -> Float32:
    """[..., 260] = 23 x 6D | 58 x (sin, cos) | 6 translations to [..., 133] parameters."""
    three, one = 2 * _BODY_THREE.size, 2 * _BODY_ONE.size
    lead = continuous.shape[:-1]
    pose = np.zeros((*lead, BODY_POSE), np.float32)
    turns = xyz_from_6d(continuous[..., :three].reshape(*lead, -1, 6))
    pose[..., _BODY_THREE] = turns.reshape(*lead, -1)
    pose[..., _BODY_ONE] = _angles(continuous[..., three : three + one])
    pose[..., _BODY_TRANSLATIONS] = continuous[..., three + one :]
    return pose


def body_continuous(pose: Float32) -> Float32:
    """[..., 133] parameters to [..., 260], the inverse of `body_pose`."""
    lead = pose.shape[:-1]
    turns = matrix_columns_from_xyz(pose[..., _BODY_THREE].reshape(*lead, -1, 3))
    parts = [
        turns.reshape(*lead, -1),
        _pairs(pose[..., _BODY_ONE]),
        pose[..., _BODY_TRANSLATIONS],
    ]
    return np.concatenate(parts, axis=-1)


def hand_pose(continuous: Float32) -> Float32:
    """[..., 54] of one hand, by joint, to [..., 27] parameters."""
    lead = continuous.shape[:-1]
    pose = np.zeros((*lead, HAND_POSE), np.float32)
    turns = xyz_from_6d(continuous[..., _HAND_CONTINUOUS_IS_THREE].reshape(*lead, -1, 6))
    pose[..., _HAND_IS_THREE] = turns.reshape(*lead, -1)
    pose[..., ~_HAND_IS_THREE] = _angles(continuous[..., ~_HAND_CONTINUOUS_IS_THREE])
    return pose

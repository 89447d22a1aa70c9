"""Merge accepted hands into the body: wrist IK, hand pose, shared scale and shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sam3d_gguf.runtime.body.hands import (
    LEFT_SCALE,
    RIGHT_SCALE,
    SHARED_SCALE,
    SHARED_SHAPE,
    WRIST_PARAMETERS,
    HandView,
    WristCheck,
    check_wrists,
)
from sam3d_gguf.runtime.body.pose_head import PosedBody, PoseHead, PoseParameters
from sam3d_gguf.runtime.geometry.arrays import Bool, Float32
from sam3d_gguf.runtime.geometry.pose_values import HAND_CONTINUOUS
from sam3d_gguf.runtime.geometry.rotations import euler_from_matrix
from sam3d_gguf.runtime.ggml.network import Taps

WRIST_LIMITS = ((-2.2, 1.0), (-2.2, 1.5), (-1.2, 1.5))
"""Ranges of a wrist's X, Z and Y angles, radians."""


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """The merged pose of B people and how it came about.

    Attributes:
        candidate: parameters with both hands dropped in, before the wrists are solved.
        check: wrists against that candidate.
        wrist_angles: [B, 2, 3] X, Z, Y.
        accepted: [B, 2] hands that were merged.
        parameters: the merged parameters; body: their mesh.
        wrists: [B, 2, 3] wrist angles that were put in.
        hand_scale: [B, 2] scale coefficients of the (left, right) hand.
    """

    candidate: PoseParameters
    check: WristCheck
    wrist_angles: Float32
    accepted: Bool
    parameters: PoseParameters
    body: PosedBody
    wrists: Float32
    hand_scale: Float32


def merge(
    head: PoseHead,
    pose: PoseParameters,
    left: HandView,
    right: HandView,
    own_wrists: Float32,
    valid: Bool,
    angle_limit: float,
    taps: Taps | None,
) -> Merge:
    """Put the hands' predictions into a body pose where they are accepted.

    Args:
        head: the body's pose head.
        pose: parameters of the last body pass.
        own_wrists: [B, 2, 3, 3] local wrist rotations of the first body pass.
        valid: [B, 2] hands that passed the four tests.
        angle_limit: radians.
        taps: receives the two meshes' inputs and outputs.
    """
    candidate = _with_both_hands(pose, left, right)
    _tap_parameters(taps, "fk_in", candidate)
    trial = head.pose(candidate, taps=_rerun(taps))
    rest = head.constants.joint_rotation
    check = check_wrists(trial.joint_rotations, rest, left, right, own_wrists)
    tap_wrists(taps, own_wrists, check)
    angles = within_limits(euler_from_matrix("XZY", check.local))
    accepted = (check.angle < angle_limit) & valid
    own = pose.body[:, WRIST_PARAMETERS].reshape(-1, 2, 3)
    wrists = np.where(accepted[..., None], angles, own)
    merged = _merged(pose, candidate, left, right, accepted, wrists)
    _tap_parameters(taps, "rerun_in", merged)
    return Merge(
        candidate=candidate,
        check=check,
        wrist_angles=angles,
        accepted=accepted,
        parameters=merged,
        body=head.pose(merged, taps=_rerun(taps)),
        wrists=wrists,
        hand_scale=merged.scale[:, [LEFT_SCALE, RIGHT_SCALE]],
    )


def _with_both_hands(pose: PoseParameters, left: HandView, right: HandView) -> PoseParameters:
    half = np.float32(2)
    scale, shape = pose.scale.copy(), pose.shape.copy()
    scale[:, LEFT_SCALE] = left.scale[:, LEFT_SCALE]
    scale[:, RIGHT_SCALE] = right.scale[:, RIGHT_SCALE]
    scale[:, SHARED_SCALE] = (left.scale[:, SHARED_SCALE] + right.scale[:, SHARED_SCALE]) / half
    shape[:, SHARED_SHAPE] = (left.shape[:, SHARED_SHAPE] + right.shape[:, SHARED_SHAPE]) / half
    hand = np.concatenate([left.hand[:, :HAND_CONTINUOUS], right.hand[:, HAND_CONTINUOUS:]], axis=1)
    return replace(pose, hand=hand, scale=scale, shape=shape)


def _merged(
    pose: PoseParameters,
    candidate: PoseParameters,
    left: HandView,
    right: HandView,
    accepted: Bool,
    wrists: Float32,
) -> PoseParameters:
    count = len(accepted)
    body, scale, shape = pose.body.copy(), pose.scale.copy(), pose.shape.copy()
    body[:, WRIST_PARAMETERS] = wrists.reshape(count, 6)
    paired = (count, 2, HAND_CONTINUOUS)
    hand = np.where(
        accepted[..., None], candidate.hand.reshape(paired), pose.hand.reshape(paired)
    ).reshape(count, -1)
    for index, place in ((0, LEFT_SCALE), (1, RIGHT_SCALE)):
        scale[:, place] = np.where(accepted[:, index], candidate.scale[:, place], scale[:, place])
    _share(scale, left.scale, right.scale, accepted, SHARED_SCALE)
    _share(shape, left.shape, right.shape, accepted, SHARED_SHAPE)
    return replace(pose, body=body, hand=hand, scale=scale, shape=shape)


def _share(target: Float32, left: Float32, right: Float32, accepted: Bool, part: slice) -> None:
    """Replace `part` of [B, N] coefficients by the mean over the accepted hands, if any."""
    weights = accepted.astype(np.float32)
    total = weights.sum(axis=1, keepdims=True)
    mean = left[:, part] * weights[:, :1] + right[:, part] * weights[:, 1:]
    mean = mean / (total + np.float32(1e-8))
    target[:, part] = np.where(total > 0, mean, target[:, part])


def within_limits(wrists: Float32) -> Float32:
    """[..., 3] X, Z, Y angles, or their other solution where that violates the limits less."""
    pi = np.float32(np.pi)
    turned = [wrists[..., 0] + pi, -(wrists[..., 1] + pi), wrists[..., 2] + pi]
    other = np.stack([np.arctan2(np.sin(angle), np.cos(angle)) for angle in turned], axis=-1)
    better = _violation(other) < _violation(wrists)
    return np.where(better[..., None], other, wrists)


def _violation(wrists: Float32) -> Float32:
    low = np.array([limits[0] for limits in WRIST_LIMITS], np.float32)
    high = np.array([limits[1] for limits in WRIST_LIMITS], np.float32)
    below, above = np.maximum(low - wrists, 0), np.maximum(wrists - high, 0)
    total: Float32 = (below**2 + above**2).sum(axis=-1, dtype=np.float32)
    return total


def tap_wrists(taps: Taps | None, own: Float32, check: WristCheck) -> None:
    """Capture one comparison of wrists."""
    if taps is not None:
        taps("wrist.original_local_rotmat", own)
        taps("wrist.fused_local_rotmat", check.local)
        taps("wrist.angle_difference", check.angle)


def _tap_parameters(taps: Taps | None, prefix: str, pose: PoseParameters) -> None:
    if taps is not None:
        taps(f"{prefix}.global_rot", pose.global_rotation)
        taps(f"{prefix}.body_pose_params", pose.body)
        taps(f"{prefix}.hand_pose_params", pose.hand)
        taps(f"{prefix}.scale_params", pose.scale)
        taps(f"{prefix}.shape_params", pose.shape)


def _rerun(taps: Taps | None) -> Taps | None:
    return None if taps is None else lambda name, array: taps(f"merge.rerun.{name}", array)

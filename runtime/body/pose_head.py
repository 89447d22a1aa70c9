"""Decode the 519 pose values of a head into a posed mesh, keypoints and joints.

The values are 6D global rotation 6 | body 260 | shape 45 | scale 28 | hands 2x54 | face 72.
Quirks of the original's `MHRHead` are kept: the global rotation is read as intrinsic ZYX but
placed into MHR's rx, ry, rz; hands and jaw of the body part are ignored; the face is zeroed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.body.mhr import Mhr, MhrMesh
from sam3d_gguf.runtime.body.neural import KEYPOINTS, BodyNetwork, Branch
from sam3d_gguf.runtime.geometry import pose_values
from sam3d_gguf.runtime.geometry.arrays import Float32, Int32
from sam3d_gguf.runtime.geometry.rotations import (
    euler_from_matrix,
    matrix_from_6d,
    matrix_from_euler,
    matrix_from_quaternion,
)
from sam3d_gguf.runtime.ggml.network import Taps
from sam3d_gguf.runtime.weights import Weights

GLOBAL_ROTATION = slice(0, 6)
BODY = slice(6, 266)
SHAPE = slice(266, 311)
SCALE = slice(311, 339)
HAND = slice(339, 447)
FACE = slice(447, 519)
POSE_RAW = slice(0, 266)

_BODY_VALUES = 130
_RIGHT_HAND_KEYPOINTS = slice(21, 42)
_CENTIMETRES = np.float32(100)
_TRANSLATION_UNITS = np.float32(10)


@dataclass(frozen=True, slots=True, eq=False)
class HeadConstants:
    """The untrained tensors of a pose head.

    Attributes:
        joint_rotation: [127, 3, 3] rest rotations.
        left_hand, right_hand: [27] places of the hands' parameters among the first 136.
        wrist, root: [3] rest positions of the right wrist and the root, metres.
        to_world: [3, 3] wrist frame to world.
        zeroed: [145] model parameters that the hand branch sets to 0.
    """

    joint_rotation: Float32
    left_hand: Int32
    right_hand: Int32
    wrist: Float32
    root: Float32
    to_world: Float32
    zeroed: Int32


def load_constants(weights: Weights, branch: Branch) -> HeadConstants:
    """The constants of a branch's pose head in an opened Body file."""
    prefix = "head_pose" if branch == "body" else "head_pose_hand"
    return HeadConstants(
        joint_rotation=weights.array(f"{prefix}.joint_rotation"),
        left_hand=weights.array(f"{prefix}.hand_joint_idxs_left"),
        right_hand=weights.array(f"{prefix}.hand_joint_idxs_right"),
        wrist=weights.array(f"{prefix}.right_wrist_coords"),
        root=weights.array(f"{prefix}.root_coords"),
        to_world=weights.array(f"{prefix}.local_to_world_wrist"),
        zeroed=weights.array(f"{prefix}.nonhand_param_idxs"),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PoseParameters:
    """What a head says about the pose, decoded; all [B, ...] float32, radians.

    Attributes:
        global_rotation: [B, 3] Euler angles in the order z, y, x of intrinsic ZYX.
        body: [B, 133]; 124..129 are translations; hands 62..115 and jaw 130..132 are 0.
        hand: [B, 108] PCA coefficients, left 54 | right 54.
        scale: [B, 28] and shape: [B, 45] coefficients.
        face: [B, 72], all 0.
    """

    global_rotation: Float32
    body: Float32
    hand: Float32
    scale: Float32
    shape: Float32
    face: Float32


@dataclass(frozen=True, slots=True, eq=False)
class PosedBody:
    """A posed body; metres; y and z flipped against MHR's axes, except in `joint_rotations`.

    Attributes:
        vertices: [B, V, 3].
        keypoints: [B, 70, 3].
        joints: [B, 127, 3].
        joint_rotations: [B, 127, 3, 3] global, MHR's axes.
        model_parameters: [B, 204].
        mesh: MHR's own output, cm.
    """

    vertices: Float32
    keypoints: Float32
    joints: Float32
    joint_rotations: Float32
    model_parameters: Float32
    mesh: MhrMesh


def decode_parameters(pose: Float32) -> PoseParameters:
    """[B, 519] pose values to parameters."""
    rotation = euler_from_matrix("ZYX", matrix_from_6d(pose[:, GLOBAL_ROTATION]))
    body = pose_values.body_pose(pose[:, BODY])
    body[:, pose_values.HAND_PARAMETERS] = 0
    body[:, pose_values.JAW_PARAMETERS] = 0
    return PoseParameters(
        global_rotation=rotation,
        body=body,
        hand=pose[:, HAND].copy(),
        scale=pose[:, SCALE].copy(),
        shape=pose[:, SHAPE].copy(),
        face=pose[:, FACE] * np.float32(0),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PoseHead:
    """One branch's pose head after its MLP."""

    branch: Branch
    network: BodyNetwork
    mhr: Mhr
    constants: HeadConstants

    def pose(self, parameters: PoseParameters, *, taps: Taps | None = None) -> PosedBody:
        """Run MHR and the keypoint mapping.

        Args:
            parameters: of B crops.
            taps: receives MHR's inputs and outputs as `mhr_...`.
        """
        model = self.model_parameters(parameters)
        mesh = self.mhr(parameters.shape, model, parameters.face)
        if taps is not None:
            taps("mhr_shape45", parameters.shape)
            taps("mhr_model_params204", model)
            taps("mhr_vertices_cm", mesh.vertices)
            taps("mhr_skel_state", mesh.states)
        vertices = mesh.vertices / _CENTIMETRES
        joints = mesh.states[..., :3] / _CENTIMETRES
        points = np.concatenate([vertices, joints], axis=1)
        keypoints = self.network.keypoints(self.branch, points)[:, :KEYPOINTS].copy()
        if self.branch == "hand":
            keypoints[:, : _RIGHT_HAND_KEYPOINTS.start] = 0
            keypoints[:, _RIGHT_HAND_KEYPOINTS.stop :] = 0
        return PosedBody(
            vertices=_flipped(vertices),
            keypoints=_flipped(keypoints),
            joints=_flipped(joints),
            joint_rotations=matrix_from_quaternion(mesh.states[..., 3:7]),
            model_parameters=model,
            mesh=mesh,
        )

    def model_parameters(self, parameters: PoseParameters) -> Float32:
        """[B, 204] MHR parameters: root translation and rotation, pose 130, scales 68."""
        rotation = parameters.global_rotation
        translation = np.zeros_like(rotation)
        if self.branch == "hand":
            rotation, translation = self._from_wrist(rotation)
        pose = np.concatenate(
            [translation * _TRANSLATION_UNITS, rotation, parameters.body[:, :_BODY_VALUES]],
            axis=1,
        )
        half = pose_values.HAND_CONTINUOUS
        for places, hand in (
            (self.constants.left_hand, parameters.hand[:, :half]),
            (self.constants.right_hand, parameters.hand[:, half:]),
        ):
            continuous = self.network.hand_pose(self.branch, np.ascontiguousarray(hand))
            pose[:, places] = pose_values.hand_pose(continuous)
        scales = self.network.scales(self.branch, parameters.scale)
        model = np.concatenate([pose, scales], axis=1)
        if self.branch == "hand":
            model[:, self.constants.zeroed] = 0
        return model

    def _from_wrist(self, rotation: Float32) -> tuple[Float32, Float32]:
        """A rotation in the wrist's frame to the body's, and the shift that puts the wrist at 0."""
        constants = self.constants
        world = matrix_from_euler("xyz", rotation) @ constants.to_world
        turned = euler_from_matrix("xyz", world)
        bone: Float32 = constants.wrist - constants.root
        arm = np.matmul(matrix_from_euler("xyz", turned), bone, dtype=np.float32)
        shift = np.negative(arm + constants.root, dtype=np.float32)
        return turned, shift


def _flipped(points: Float32) -> Float32:
    flipped: Float32 = points * np.array([1, -1, -1], np.float32)
    return flipped

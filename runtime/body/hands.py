"""Where the hands are, what their passes say, and whether to believe them.

Pairs are always (left, right). The left hand is seen in the mirrored photo by the decoder of
right hands; the original's quirks of un-mirroring are kept and named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sam3d_gguf.runtime.body.passes import HandDetection, PassResult, Prediction
from sam3d_gguf.runtime.geometry.arrays import Bool, Float32
from sam3d_gguf.runtime.geometry.camera import photo_to_crop
from sam3d_gguf.runtime.geometry.crop import Crop
from sam3d_gguf.runtime.geometry.pose_values import HAND_CONTINUOUS
from sam3d_gguf.runtime.geometry.rotations import angle_between, matrix_from_euler
from sam3d_gguf.runtime.ggml.network import Taps

RIGHT_WRIST, LEFT_WRIST, RIGHT_ELBOW, LEFT_ELBOW = 41, 62, 8, 7
LEFT_WRIST_JOINT, RIGHT_WRIST_JOINT = 78, 42
LOWER_ARM_JOINTS = (76, 40)
WRIST_TWIST_JOINTS = (77, 41)
WRIST_PARAMETERS = (41, 43, 42, 31, 33, 32)
"""Body pose parameters of the (left, right) wrists, each in the order X, Z, Y."""

LEFT_SCALE, RIGHT_SCALE = 9, 8
SHARED_SCALE = slice(18, 28)
SHARED_SHAPE = slice(40, 45)

MIN_BOX_SIDE = 64.0
MAX_KEYPOINT = 0.5
MAX_WRIST_DISTANCE = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class HandView:
    """One hand's pass in terms of the body, un-mirrored where it was the left one.

    Attributes:
        hand: [B, 108]; scale: [B, 28]; shape: [B, 45] coefficients.
        joint_rotations: [B, 127, 3, 3].
        keypoints_2d: [B, 70, 2] in the photo that the pass saw, pixels.
        keypoints_2d_cropped: [B, 70, 2].
        center: [B, 2] of the box in the photo, pixels; side: [B, 2] crop width and height.
    """

    hand: Float32
    scale: Float32
    shape: Float32
    joint_rotations: Float32
    keypoints_2d: Float32
    keypoints_2d_cropped: Float32
    center: Float32
    side: Float32


@dataclass(frozen=True, slots=True, eq=False)
class ScaleStatistics:
    """Mean and deviation of the (left, right) hand scale coefficients."""

    mean: tuple[float, float]
    deviation: tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class WristCheck:
    """The wrists that the hand passes ask for, against the body's.

    Attributes:
        rest: [B, 2, 3, 3] global wrist rotation at zero local rotation.
        wanted: [B, 2, 3, 3] global rotations of the hand passes.
        local: [B, 2, 3, 3] local rotations that lead to them.
        angle: [B, 2] between `local` and the body's own local rotation, radians.
    """

    rest: Float32
    wanted: Float32
    local: Float32
    angle: Float32


def hand_boxes(hands: HandDetection, crop: Crop, side: int) -> tuple[Float32, Float32]:
    """Square [B, 4] boxes of the left and right hands in the photo, x0, y0, x1, y1 pixels.

    The larger side of each detected box is taken; both axes use the crop's x scale.

    Args:
        hands: detections in 0..1 of the crop.
        crop: the body's crops.
        side: crop width, pixels.
    """
    boxes = hands.boxes * np.float32(side)
    scale = crop.affine[:, 0, 0][:, None]
    shift = crop.affine[:, :, 2]
    found: list[Float32] = []
    for index in range(2):
        box = boxes[:, index]
        longest: Float32 = box[:, 2:].max(axis=1, keepdims=True)
        half: Float32 = np.repeat(longest, 2, axis=1) / scale / np.float32(2)
        center: Float32 = (box[:, :2] - shift) / scale
        found.append(np.concatenate([center - half, center + half], axis=1))
    return found[0], found[1]


def mirrored(boxes: Float32, width: int) -> Float32:
    """[B, 4] boxes in the horizontally mirrored photo: x becomes width - x - 1."""
    result = boxes.copy()
    result[:, 0] = width - boxes[:, 2] - 1
    result[:, 2] = width - boxes[:, 0] - 1
    return result


def right_view(result: PassResult, crop: Crop) -> HandView:
    """The right hand's pass as it is."""
    prediction = result.prediction
    parameters = prediction.parameters
    return HandView(
        hand=parameters.hand,
        scale=parameters.scale,
        shape=parameters.shape,
        joint_rotations=prediction.body.joint_rotations,
        keypoints_2d=prediction.projection.points_2d,
        keypoints_2d_cropped=prediction.keypoints_2d_cropped,
        center=crop.center,
        side=crop.scale,
    )


def left_view(result: PassResult, crop: Crop, statistics: ScaleStatistics, width: int) -> HandView:
    """The left hand's pass un-mirrored: scale, wrist rotation, hand pose and box centre.

    The wrist's rotation is the right one with rows 1 and 2 negated; the keypoints stay in the
    mirrored photo.
    """
    view = right_view(result, crop)
    scale, hand = view.scale.copy(), view.hand.copy()
    (left_mean, right_mean), (left_step, right_step) = statistics.mean, statistics.deviation
    measured = np.float32(right_mean) + np.float32(right_step) * scale[:, RIGHT_SCALE]
    scale[:, LEFT_SCALE] = (measured - np.float32(left_mean)) / np.float32(left_step)
    rotations = view.joint_rotations.copy()
    rotations[:, LEFT_WRIST_JOINT] = rotations[:, RIGHT_WRIST_JOINT]
    rotations[:, LEFT_WRIST_JOINT, 1:] *= np.float32(-1)
    hand[:, :HAND_CONTINUOUS] = hand[:, HAND_CONTINUOUS:]
    center = view.center.copy()
    center[:, 0] = width - center[:, 0] - 1
    return replace(view, scale=scale, hand=hand, joint_rotations=rotations, center=center)


def local_wrists(body_pose: Float32) -> Float32:
    """[B, 133] body parameters to the local wrist rotations [B, 2, 3, 3]."""
    angles = body_pose[:, WRIST_PARAMETERS].reshape(-1, 2, 3)
    return matrix_from_euler("XZY", angles)


def check_wrists(
    body_rotations: Float32,
    rest_rotations: Float32,
    left: HandView,
    right: HandView,
    own: Float32,
) -> WristCheck:
    """Compare the wrists of the hand passes with the body's.

    Args:
        body_rotations: [B, 127, 3, 3] global rotations of the body.
        rest_rotations: [127, 3, 3] of the rig.
        own: [B, 2, 3, 3] local wrist rotations of the first body pass.
    """
    rest: Float32 = body_rotations[:, LOWER_ARM_JOINTS] @ rest_rotations[list(WRIST_TWIST_JOINTS)]
    wanted = np.stack(
        [
            left.joint_rotations[:, LEFT_WRIST_JOINT],
            right.joint_rotations[:, RIGHT_WRIST_JOINT],
        ],
        axis=1,
    )
    local: Float32 = np.swapaxes(rest, -1, -2) @ wanted
    return WristCheck(rest, wanted, local, angle_between(own, local))


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """The four tests of a hand, [B, 2] each, and the wrist distances, [B], over a crop side."""

    angle: Bool
    box_size: Bool
    keypoints: Bool
    wrist: Bool
    left_distance: Float32
    right_distance: Float32

    @property
    def valid(self) -> Bool:
        """Hands that pass all four."""
        return self.angle & self.box_size & self.keypoints & self.wrist


def wrist_points(left: HandView, right: HandView, width: int) -> tuple[Float32, Float32]:
    """[B, 2] left and right wrist of the hand passes in the photo, pixels."""
    unmirrored = left.keypoints_2d[:, RIGHT_WRIST].copy()
    unmirrored[:, 0] = width - unmirrored[:, 0] - 1
    return unmirrored, right.keypoints_2d[:, RIGHT_WRIST]


def accept(
    check: WristCheck,
    left: HandView,
    right: HandView,
    body: Prediction,
    width: int,
    angle_limit: float,
) -> Acceptance:
    """Test each hand: wrist angle, box size, all keypoints inside, wrist near the body's.

    A quirk: the right wrist's distance is divided by the left crop's side, and vice versa.
    """
    views = (left, right)
    left_wrist, right_wrist = wrist_points(left, right, width)
    seen = body.projection.points_2d
    left_distance = _length(left_wrist - seen[:, LEFT_WRIST]) / right.side[:, 0]
    right_distance = _length(right_wrist - seen[:, RIGHT_WRIST]) / left.side[:, 0]
    spread = [np.abs(view.keypoints_2d_cropped).max(axis=(1, 2)) for view in views]
    return Acceptance(
        angle=check.angle < angle_limit,
        box_size=np.stack([(view.side > MIN_BOX_SIDE).all(axis=1) for view in views], axis=1),
        keypoints=np.stack([value < MAX_KEYPOINT for value in spread], axis=1),
        wrist=np.stack([left_distance, right_distance], axis=1) < MAX_WRIST_DISTANCE,
        left_distance=left_distance,
        right_distance=right_distance,
    )


def _length(vectors: Float32) -> Float32:
    length: Float32 = np.sqrt((vectors * vectors).sum(axis=-1, dtype=np.float32))
    return length


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Keypoint prompts for the second body pass.

    Attributes:
        values: [B, N, 3]; N may be 0 for one person.
        valid: [4] right wrist, left wrist, right elbow, left elbow, for one person; else None.
    """

    values: Float32
    valid: Bool | None


def make_prompts(
    left: HandView,
    right: HandView,
    body: Prediction,
    crop: Crop,
    valid: Bool,
    width: int,
    taps: Taps | None,
) -> Prompts:
    """Wrists of the hand passes and elbows of the body as prompts in 0..1 of the body's crop.

    Prompts of refused hands or outside the crop are removed for one person and become dummies
    for several.
    """
    left_wrist, right_wrist = wrist_points(left, right, width)
    seen = body.projection.points_2d
    points = [right_wrist, left_wrist, seen[:, RIGHT_ELBOW], seen[:, LEFT_ELBOW]]
    cropped = [photo_to_crop(point[:, None], crop.affine, crop.size) for point in points]
    if taps is not None:
        for point in cropped:
            taps("prompt.keypoint_crop", point)
    places = np.concatenate(cropped, axis=1)
    usable = valid[:, [1, 0, 1, 0]]
    inside = np.abs(places) <= np.float32(0.5)
    labels = np.array([RIGHT_WRIST, LEFT_WRIST, RIGHT_ELBOW, LEFT_ELBOW], np.float32)
    prompts = np.empty((*places.shape[:2], 3), np.float32)
    prompts[..., :2] = np.clip(places + np.float32(0.5), 0, 1)
    prompts[..., 2] = labels
    if len(places) > 1:
        keep = inside.all(axis=-1) & usable
        dummy = np.array([0, 0, -2], np.float32)
        return Prompts(np.where(keep[..., None], prompts, dummy), None)
    strictly = (np.abs(places) < np.float32(0.5)).all(axis=-1)
    chosen = (strictly & usable)[0]
    return Prompts(prompts[:, chosen], chosen)

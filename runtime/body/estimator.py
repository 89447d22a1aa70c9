"""The whole estimator: a photo and boxes to posed bodies, hands refined where asked.

The order of steps, thresholds and quirks are those of the original's `run_inference` and
`process_one_image` (facebookresearch/sam-3d-body b5c765a0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sam3d_gguf.runtime.body import hands as hand_steps
from sam3d_gguf.runtime.body.capture import Capture
from sam3d_gguf.runtime.body.hands import HandView, ScaleStatistics
from sam3d_gguf.runtime.body.passes import (
    Features,
    HandDetection,
    Passes,
    PassResult,
    Prediction,
    TokenResult,
)
from sam3d_gguf.runtime.body.pose_head import PosedBody, PoseParameters
from sam3d_gguf.runtime.body.refinement import Merge, merge, tap_wrists
from sam3d_gguf.runtime.body.settings import WRIST_ANGLE_LIMIT
from sam3d_gguf.runtime.geometry.arrays import Bool, Float32, Uint8
from sam3d_gguf.runtime.geometry.crop import (
    BODY_PADDING,
    HAND_PADDING,
    Crop,
    warp_affine_float,
)
from sam3d_gguf.runtime.ggml.network import Taps

InferenceType = Literal["body", "full", "hand"]
Checkpoint = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One photo and the people in it.

    Attributes:
        photo: [H, W, 3] uint8 RGB.
        boxes: [N, 4] float32 x0, y0, x1, y1, pixels.
        intrinsics: [3, 3] float32.
        masks: [N, H, W] uint8, 1 on the person, or None.
        recorded_hand_boxes: [N, 4] boxes of the left and right hands to start the hand passes
            from, instead of the detected ones; for comparisons stage by stage.
    """

    photo: Uint8
    boxes: Float32
    intrinsics: Float32
    masks: Uint8 | None = None
    recorded_hand_boxes: tuple[Float32, Float32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """What the estimator says about N people.

    Attributes:
        pose_raw: [N, 266]; zeros after hand refinement.
        parameters: decoded parameters.
        body: mesh, keypoints and joints.
        camera: [N, 3] raw; translation: [N, 3] metres; focal_length: [N] pixels.
        keypoints_2d: [N, 70, 2] pixels; keypoints_2d_cropped: [N, 70, 2].
        joint_rotations: [N, 127, 3, 3]; after refinement those of the last body pass.
        hands: what the last unprompted pass detected.
        hand_boxes: [N, 4] refined (left, right) crops in the photo, or None.
        hands_accepted: [N, 2] hands that were merged, or None.
    """

    boxes: Float32
    pose_raw: Float32
    parameters: PoseParameters
    body: PosedBody
    camera: Float32
    translation: Float32
    focal_length: Float32
    keypoints_2d: Float32
    keypoints_2d_cropped: Float32
    joint_rotations: Float32
    hands: HandDetection
    hand_boxes: tuple[Float32, Float32] | None = None
    hands_accepted: Bool | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Estimator:
    """Runs requests on one loaded model. Not safe for concurrent calls.

    Attributes:
        statistics: of the hand scales.
        checkpoint: called with the name of each stage before it starts; may raise to cancel.
    """

    passes: Passes
    statistics: ScaleStatistics
    checkpoint: Checkpoint

    def run(
        self, request: Request, inference_type: InferenceType, capture: Capture | None = None
    ) -> Estimate:
        """Estimate every person of a request.

        Args:
            inference_type: `body`, `full` (hands refined), or `hand` (boxes are right hands).
            capture: collects the intermediates.
        """
        if inference_type == "full":
            return self._full(request, capture)
        if inference_type == "hand":
            return self._hand(request)
        taps = _section(capture, "01.body")
        _tap_request(capture, request)
        features, result = self._body_pass(request, taps)
        if capture is not None:
            size = self.passes.settings.crop_size
            other = [warp_affine_float(request.photo, m, size) for m in features.crop.matrix]
            capture.section("08.alternative")("crop_image_u8_hwc_opencv5", np.stack(other))
        return _estimate(features.crop, result)

    def tokens(self, request: Request) -> TokenResult:
        """The body's pose tokens and camera translations alone, without hand tokens."""
        self.checkpoint("body features")
        features = self.passes.features(
            request.photo, request.boxes, request.intrinsics, BODY_PADDING, masks=request.masks
        )
        self.checkpoint("body decoder")
        return self.passes.decode_token(features)

    def _body_pass(self, request: Request, taps: Taps | None) -> tuple[Features, PassResult]:
        self.checkpoint("body features")
        features = self.passes.features(
            request.photo,
            request.boxes,
            request.intrinsics,
            BODY_PADDING,
            masks=request.masks,
            taps=taps,
        )
        self.checkpoint("body decoder")
        return features, self.passes.decode("body", features, taps=taps)

    def _hand(self, request: Request) -> Estimate:
        self.checkpoint("hand features")
        features = self.passes.features(
            request.photo, request.boxes, request.intrinsics, BODY_PADDING, masks=request.masks
        )
        self.checkpoint("hand decoder")
        return _estimate(features.crop, self.passes.decode("hand", features))

    def _hand_pass(
        self, photo: Uint8, boxes: Float32, intrinsics: Float32, taps: Taps | None
    ) -> tuple[Crop, PassResult]:
        self.checkpoint("hand features")
        features = self.passes.features(photo, boxes, intrinsics, HAND_PADDING, taps=taps)
        self.checkpoint("hand decoder")
        result = self.passes.decode("hand", features, taps=taps)
        return features.crop, result

    def _hand_views(
        self, request: Request, features: Features, result: PassResult, capture: Capture | None
    ) -> tuple[HandView, HandView]:
        side, width = self.passes.settings.crop_size[0], request.photo.shape[1]
        own = hand_steps.hand_boxes(result.hands, features.crop, side)
        left_boxes, right_boxes = request.recorded_hand_boxes or own
        taps = _section(capture, "11.boxes")
        if taps is not None:
            taps("left_xyxy", left_boxes)
            taps("right_xyxy", right_boxes)
        flipped = np.ascontiguousarray(request.photo[:, ::-1])
        left = self._hand_pass(
            flipped,
            hand_steps.mirrored(left_boxes, width),
            request.intrinsics,
            _section(capture, "12.lhand"),
        )
        right = self._hand_pass(
            request.photo, right_boxes, request.intrinsics, _section(capture, "13.rhand")
        )
        left_view = hand_steps.left_view(left[1], left[0], self.statistics, width)
        return left_view, hand_steps.right_view(right[1], right[0])

    def _full(self, request: Request, capture: Capture | None) -> Estimate:
        width = request.photo.shape[1]
        features, first = self._body_pass(request, None)
        own_wrists = hand_steps.local_wrists(first.prediction.parameters.body)
        left, right = self._hand_views(request, features, first, capture)
        criteria = _section(capture, "14.criteria")
        check = hand_steps.check_wrists(
            first.prediction.body.joint_rotations,
            self.passes.body.constants.joint_rotation,
            left,
            right,
            own_wrists,
        )
        tap_wrists(criteria, own_wrists, check)
        accepted = hand_steps.accept(check, left, right, first.prediction, width, WRIST_ANGLE_LIMIT)
        prompts = hand_steps.make_prompts(
            left, right, first.prediction, features.crop, accepted.valid, width, criteria
        )
        last = self._prompted(features, first, prompts.values, capture)
        self.checkpoint("merge")
        merged = merge(
            self.passes.body,
            last.parameters,
            left,
            right,
            own_wrists,
            accepted.valid,
            WRIST_ANGLE_LIMIT,
            _section(capture, "16.merge"),
        )
        _tap_locals(_section(capture, "17.locals"), accepted, prompts, merged, left, right)
        return _merged_estimate(request, features.crop, first, last, merged, left, right)

    def _prompted(
        self, features: Features, first: PassResult, prompts: Float32, capture: Capture | None
    ) -> Prediction:
        if prompts.shape[1] == 0:
            return first.prediction
        self.checkpoint("prompted decoder")
        taps = _section(capture, "15.prompt")
        if taps is not None:
            taps("keypoint_prompt", prompts)
        result = self.passes.decode("body", features, prompts, first.prediction, taps=taps)
        return result.prediction


def _section(capture: Capture | None, name: str) -> Taps | None:
    return None if capture is None else capture.section(name)


def _estimate(crop: Crop, result: PassResult) -> Estimate:
    prediction = result.prediction
    return Estimate(
        boxes=crop.box,
        pose_raw=prediction.pose_raw,
        parameters=prediction.parameters,
        body=prediction.body,
        camera=prediction.camera,
        translation=prediction.projection.translation,
        focal_length=prediction.projection.focal_length,
        keypoints_2d=prediction.projection.points_2d,
        keypoints_2d_cropped=prediction.keypoints_2d_cropped,
        joint_rotations=prediction.body.joint_rotations,
        hands=result.hands,
    )


def _merged_estimate(
    request: Request,
    crop: Crop,
    first: PassResult,
    last: Prediction,
    merged: Merge,
    left: HandView,
    right: HandView,
) -> Estimate:
    height, width = request.photo.shape[:2]
    projection = last.projection
    return Estimate(
        boxes=crop.box,
        pose_raw=np.zeros_like(last.pose_raw),
        parameters=merged.parameters,
        body=merged.body,
        camera=last.camera,
        translation=projection.translation,
        focal_length=projection.focal_length,
        keypoints_2d=_middle_projection(
            merged.body.keypoints, projection.translation, projection.focal_length, width, height
        ),
        keypoints_2d_cropped=last.keypoints_2d_cropped,
        joint_rotations=last.body.joint_rotations,
        hands=first.hands,
        hand_boxes=(_corners(left), _corners(right)),
        hands_accepted=merged.accepted,
    )


def _middle_projection(
    points: Float32, translation: Float32, focal: Float32, width: int, height: int
) -> Float32:
    """The original's last projection: fx on both axes and the photo's middle, not K."""
    moved: Float32 = points + translation[:, None]
    depth = moved[..., 2:]
    middle: Float32 = np.array([width / 2, height / 2], np.float32) * depth
    image: Float32 = moved[..., :2] * focal[:, None, None] + middle
    return np.divide(image, depth, dtype=np.float32)


def _corners(view: HandView) -> Float32:
    half: Float32 = view.side / np.float32(2)
    low: Float32 = view.center - half
    high: Float32 = view.center + half
    return np.concatenate([low, high], axis=1)


def _tap_request(capture: Capture | None, request: Request) -> None:
    taps = _section(capture, "00.input")
    if taps is not None:
        taps("image_u8_rgb_hwc", request.photo)
        taps("bbox_xyxy", _single(request.boxes))
        taps("cam_int", request.intrinsics)


def _single(array: Float32) -> Float32:
    return array[0] if len(array) == 1 else array


def _tap_locals(
    taps: Taps | None,
    accepted: hand_steps.Acceptance,
    prompts: hand_steps.Prompts,
    merged: Merge,
    left: HandView,
    right: HandView,
) -> None:
    if taps is None:
        return
    taps("angle_difference_valid_mask", accepted.angle)
    taps("hand_box_size_valid_mask", accepted.box_size)
    taps("hand_kps2d_valid_mask", accepted.keypoints)
    taps("left_kps_dist", accepted.left_distance)
    taps("right_kps_dist", accepted.right_distance)
    taps("hand_wrist_kps2d_valid_mask", accepted.wrist)
    taps("hand_valid_mask", accepted.valid)
    if prompts.valid is not None:
        taps("valid_keypoint", prompts.valid)
    taps("updated_hand_pose", merged.candidate.hand)
    taps("updated_scale", merged.candidate.scale)
    taps("updated_shape", merged.candidate.shape)
    taps("wrist_zero_rot_pose", merged.check.rest)
    taps("pred_global_wrist_rotmat", merged.check.wanted)
    taps("fused_local_wrist_rotmat", merged.check.local)
    taps("wrist_xzy", merged.wrist_angles)
    taps("valid_angle", merged.accepted[..., None])
    taps("updated_body_pose", merged.wrists)
    taps("masked_hand_scale", merged.hand_scale)
    for name, view in (("lhand", left), ("rhand", right)):
        taps(f"{name}_output_after_edit.hand", view.hand)
        taps(f"{name}_output_after_edit.scale", view.scale)
        taps(f"{name}_output_after_edit.shape", view.shape)
        taps(f"{name}_output_after_edit.joint_global_rots", view.joint_rotations)
        taps(f"{name}_output_after_edit.pred_keypoints_2d", view.keypoints_2d)
        taps(f"batch_{name}.bbox_center_after_unflip", view.center[None])

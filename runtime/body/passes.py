"""One pass of the estimator over the crops of a photo: crop, features, decoder, projection."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.body.neural import (
    BodyNetwork,
    Branch,
    DecoderResult,
    Feedback,
    ImageFeatures,
    LayerOutput,
)
from sam3d_gguf.runtime.body.pose_head import (
    FACE,
    POSE_RAW,
    PosedBody,
    PoseHead,
    PoseParameters,
    decode_parameters,
)
from sam3d_gguf.runtime.body.settings import BodySettings
from sam3d_gguf.runtime.geometry import camera
from sam3d_gguf.runtime.geometry.arrays import Float32, Uint8
from sam3d_gguf.runtime.geometry.camera import Projection
from sam3d_gguf.runtime.geometry.crop import Crop, crop_photo, normalize, warp_affine
from sam3d_gguf.runtime.ggml.network import Taps

DUMMY_LABEL = -2.0


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What a layer predicts for B crops.

    Attributes:
        pose_raw: [B, 266] 6D global rotation and continuous body pose.
        camera: [B, 3] raw (s, tx, ty).
        translation: [B, 3] `pred_cam_t`, metres.
        keypoints_2d_cropped: [B, 70, 2], crop units -0.5..0.5.
        pose_token: [B, DIM].
    """

    pose_raw: Float32
    parameters: PoseParameters
    body: PosedBody
    camera: Float32
    projection: Projection
    keypoints_2d_cropped: Float32
    pose_token: Float32


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """What a pass knows before the decoder: kept for a prompted second pass.

    Attributes:
        rays: [B, 2, H, W]; condition: [B, 3]; intrinsics: [3, 3].
    """

    crop: Crop
    image: ImageFeatures
    rays: Float32
    condition: Float32
    intrinsics: Float32


@dataclass(frozen=True, slots=True, eq=False)
class HandDetection:
    """Where the body pass sees the hands, (left, right).

    Attributes:
        boxes: [B, 2, 4] cx, cy, w, h in 0..1 of the crop.
        logits: [B, 2, 2].
    """

    boxes: Float32
    logits: Float32


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
    """The end of a decoder pass."""

    prediction: Prediction
    hands: HandDetection


@dataclass(frozen=True, slots=True, eq=False)
class TokenResult:
    """The end of a features-only pass: [B, DIM] pose tokens and [B, 3] `pred_cam_t`, metres."""

    pose_token: Float32
    translation: Float32


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """The passes of one loaded model."""

    network: BodyNetwork
    body: PoseHead
    hand: PoseHead
    settings: BodySettings

    def head(self, branch: Branch) -> PoseHead:
        """The pose head of a branch."""
        return self.body if branch == "body" else self.hand

    def features(
        self,
        photo: Uint8,
        boxes: Float32,
        intrinsics: Float32,
        padding: float,
        *,
        masks: Uint8 | None = None,
        taps: Taps | None = None,
    ) -> Features:
        """Crop B boxes and run the backbone.

        Args:
            photo: [H, W, 3] uint8 RGB.
            boxes: [B, 4] corners, pixels.
            intrinsics: [3, 3].
            padding: factor on the boxes' sides.
            masks: [B, H, W] uint8, 1 on the person; None for no mask prompt.
            taps: receives every stage.
        """
        settings = self.settings
        crop = crop_photo(photo, boxes, settings.crop_size, padding)
        pixels = normalize(crop.image, settings.mean, settings.deviation)
        rays = camera.pixel_rays(crop.affine, intrinsics, settings.crop_size)
        _tap_crop(taps, crop, pixels, rays)
        mask = None if masks is None else _crop_masks(masks, crop, settings.crop_size)
        score = None if masks is None else np.ones(len(boxes), np.float32)
        image = self.network.image_features(pixels, mask, score, taps=taps)
        condition = camera.crop_condition(
            crop.center,
            crop.scale,
            crop.photo_size,
            intrinsics,
            own_center=settings.own_center,
        )
        if taps is not None:
            taps("cond.cliff", condition)
        return Features(crop, image, rays, condition, intrinsics)

    def decode(
        self,
        branch: Branch,
        features: Features,
        prompts: Float32 | None = None,
        previous: Prediction | None = None,
        *,
        taps: Taps | None = None,
    ) -> PassResult:
        """Run a branch's decoder.

        Args:
            prompts: [B, N, 3] x, y in 0..1 of the crop and label; None is one dummy.
            previous: the prediction that the previous-estimate token carries.
        """
        found: list[Prediction] = []

        def feedback(output: LayerOutput) -> Feedback:
            prediction = self._predict(branch, features, output, taps)
            found[:] = [prediction]
            return _as_feedback(prediction)

        result = self.network.decode(
            branch,
            features.image,
            features.rays,
            features.condition,
            dummy_prompts(len(features.rays)) if prompts is None else prompts,
            feedback,
            None if previous is None else previous_estimate(previous),
            taps=taps,
        )
        return PassResult(found[0], _detection(result))

    def decode_token(self, features: Features) -> TokenResult:
        """Run the body decoder for its pose token alone; the last layer decodes no mesh."""

        def feedback(output: LayerOutput) -> Feedback:
            if output.last:
                return _no_feedback(len(output.pose))
            return _as_feedback(self._predict("body", features, output, None))

        result = self.network.decode(
            "body",
            features.image,
            features.rays,
            features.condition,
            dummy_prompts(len(features.rays)),
            feedback,
            hand_tokens=False,
        )
        output = result.output
        return TokenResult(output.pose_token, self._translation("body", features, output.camera))

    def _translation(self, branch: Branch, features: Features, values: Float32) -> Float32:
        crop = features.crop
        return camera.camera_translation(
            values,
            crop.center,
            crop.scale[:, 0],
            crop.photo_size,
            _per_crop(features),
            factor=self.settings.scale_factor(branch),
            own_center=self.settings.own_center,
        )

    def _predict(
        self, branch: Branch, features: Features, output: LayerOutput, taps: Taps | None
    ) -> Prediction:
        prefix = f"head.layer{output.layer:02d}."
        layer_taps = None if taps is None else _prefixed(taps, prefix)
        parameters = decode_parameters(output.pose)
        body = self.head(branch).pose(parameters, taps=layer_taps)
        translation = self._translation(branch, features, output.camera)
        projection = camera.project(body.keypoints, translation, _per_crop(features))
        crop = features.crop
        prediction = Prediction(
            pose_raw=output.pose[:, POSE_RAW].copy(),
            parameters=parameters,
            body=body,
            camera=output.camera,
            projection=projection,
            keypoints_2d_cropped=camera.photo_to_crop(projection.points_2d, crop.affine, crop.size),
            pose_token=output.pose_token,
        )
        if layer_taps is not None:
            vertices = camera.project(body.vertices, translation, _per_crop(features))
            _tap_prediction(layer_taps, output, prediction, vertices)
        return prediction


def dummy_prompts(count: int) -> Float32:
    """[B, 1, 3]: the prompt of a pass without prompts, (0, 0) with label -2."""
    prompts = np.zeros((count, 1, 3), np.float32)
    prompts[..., 2] = DUMMY_LABEL
    return prompts


def previous_estimate(prediction: Prediction) -> Float32:
    """[B, 522]: pose 519 | camera 3 of a prediction."""
    parameters = prediction.parameters
    return np.concatenate(
        [
            prediction.pose_raw,
            parameters.shape,
            parameters.scale,
            parameters.hand,
            parameters.face,
            prediction.camera,
        ],
        axis=1,
    )


def _per_crop(features: Features) -> Float32:
    count = len(features.rays)
    return np.ascontiguousarray(np.broadcast_to(features.intrinsics, (count, 3, 3)))


def _crop_masks(masks: Uint8, crop: Crop, size: tuple[int, int]) -> Float32:
    cut = [
        warp_affine(mask[..., None], matrix, size)[..., 0]
        for mask, matrix in zip(masks, crop.matrix, strict=True)
    ]
    return np.stack(cut)[:, None].astype(np.float32)


def _as_feedback(prediction: Prediction) -> Feedback:
    return Feedback(
        keypoints_2d_cropped=prediction.keypoints_2d_cropped,
        keypoints_2d_depth=prediction.projection.depth,
        keypoints_3d=prediction.body.keypoints,
    )


def _no_feedback(count: int) -> Feedback:
    points = np.zeros((count, 70, 3), np.float32)
    return Feedback(points[..., :2].copy(), points[..., 0].copy(), points)


def _detection(result: DecoderResult) -> HandDetection:
    if result.hand_box_logits is None or result.hand_cls_logits is None:
        raise ValueError("the decoder ran without hand detection tokens")
    one = np.float32(1)
    return HandDetection(one / (one + np.exp(-result.hand_box_logits)), result.hand_cls_logits)


def _prefixed(taps: Taps, prefix: str) -> Taps:
    def take(name: str, array: NDArray[np.generic]) -> None:
        taps(prefix + name, array)

    return take


def _tap_crop(taps: Taps | None, crop: Crop, pixels: Float32, rays: Float32) -> None:
    if taps is None:
        return
    taps("crop.bbox_xyxy", crop.box)
    taps("crop.bbox_center", crop.center)
    taps("crop.bbox_scale", crop.scale)
    taps("crop.affine_trans", crop.affine)
    taps("crop.ori_img_size", crop.photo_size)
    taps("crop.img_size", crop.size)
    taps("crop.image_u8_hwc", crop.image)
    taps("image.normalized", pixels)
    taps("ray.full_resolution", rays)


def _tap_prediction(
    taps: Taps, output: LayerOutput, prediction: Prediction, vertices: Projection
) -> None:
    pose = output.pose.copy()
    pose[:, FACE] *= np.float32(0)
    body, projection = prediction.body, prediction.projection
    taps("pose_519", pose)
    taps("global_rot", prediction.parameters.global_rotation)
    taps("body_pose", prediction.parameters.body)
    taps("pred_keypoints_3d", body.keypoints)
    taps("pred_vertices", body.vertices)
    taps("pred_joint_coords", body.joints)
    taps("joint_global_rots", body.joint_rotations)
    taps("pred_cam", prediction.camera)
    taps("pred_cam_t", projection.translation)
    taps("pred_keypoints_2d", projection.points_2d)
    taps("pred_keypoints_2d_depth", projection.depth)
    taps("pred_keypoints_2d_verts", vertices.points_2d)
    taps("pred_keypoints_2d_cropped", prediction.keypoints_2d_cropped)

"""Give every intermediate of a run its capture name, as the captures of the original have it.

A name is `<pass>.<number>.<stage>`; the numbers count the stages of a pass in execution order,
whatever the depth of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.ggml.network import Taps

Array = NDArray[Any]

_CROP = [
    "crop.bbox_xyxy",
    "crop.bbox_center",
    "crop.bbox_scale",
    "crop.affine_trans",
    "crop.ori_img_size",
    "crop.img_size",
    "crop.image_u8_hwc",
]
_BLOCK = ["norm1", "qkv", "q_rope", "k_rope", "attn_proj", "ls1", "norm2", "swiglu", "ls2"]
_DECODER_IN = [
    "decoder.init_input",
    "decoder.init_token",
    "decoder.prev_input",
    "decoder.prev_token",
    "ray.downsampled_xyz",
    "ray.fourier",
    "ray.embedding_in_features",
    "ray.out_features",
    "prompt.keypoints_in",
    "prompt.embedding",
    "prompt.mask",
    "prompt.token",
    "decoder.tokens_in",
    "decoder.token_augment_in",
]
_LAYER_PARTS = ["x_pe_normed", "context_pe_normed", "self_attn", "cross_attn"]
_HEAD = [
    "pose_residual_519",
    "mhr_shape45",
    "mhr_model_params204",
    "mhr_vertices_cm",
    "mhr_skel_state",
    "pose_519",
    "global_rot",
    "body_pose",
    "pred_keypoints_3d",
    "pred_vertices",
    "pred_joint_coords",
    "joint_global_rots",
    "pred_cam",
    "pred_cam_t",
    "pred_keypoints_2d",
    "pred_keypoints_2d_depth",
    "pred_keypoints_2d_verts",
    "pred_keypoints_2d_cropped",
]
_HAND = ["hand.box_logits", "hand.cls_logits"]
_LOCALS = [
    "angle_difference_valid_mask",
    "hand_box_size_valid_mask",
    "hand_kps2d_valid_mask",
    "left_kps_dist",
    "right_kps_dist",
    "hand_wrist_kps2d_valid_mask",
    "hand_valid_mask",
    "valid_keypoint",
    "updated_hand_pose",
    "updated_scale",
    "updated_shape",
    "wrist_zero_rot_pose",
    "pred_global_wrist_rotmat",
    "fused_local_wrist_rotmat",
    "wrist_xzy",
    "valid_angle",
    "updated_body_pose",
    "masked_hand_scale",
    "lhand_output_after_edit.hand",
    "lhand_output_after_edit.scale",
    "lhand_output_after_edit.shape",
    "lhand_output_after_edit.joint_global_rots",
    "lhand_output_after_edit.pred_keypoints_2d",
    "batch_lhand.bbox_center_after_unflip",
    "rhand_output_after_edit.hand",
    "rhand_output_after_edit.scale",
    "rhand_output_after_edit.shape",
    "rhand_output_after_edit.joint_global_rots",
    "rhand_output_after_edit.pred_keypoints_2d",
    "batch_rhand.bbox_center_after_unflip",
]
_PARAMETERS = ["global_rot", "body_pose_params", "hand_pose_params", "scale_params", "shape_params"]
_RERUN = [
    f"merge.rerun.{name}"
    for name in ("mhr_shape45", "mhr_model_params204", "mhr_vertices_cm", "mhr_skel_state")
]
_WRIST = [
    f"wrist.{name}" for name in ("original_local_rotmat", "fused_local_rotmat", "angle_difference")
]
_PERSON = [
    "bbox",
    "focal_length",
    "pred_keypoints_3d",
    "pred_keypoints_2d",
    "pred_vertices",
    "pred_cam_t",
    "pred_pose_raw",
    "global_rot",
    "body_pose_params",
    "hand_pose_params",
    "scale_params",
    "shape_params",
    "expr_params",
    "pred_joint_coords",
    "pred_global_rots",
    "mhr_model_params",
]
_BODY_OUT = ["hand_box", "hand_logits", "pred_cam", "pred_keypoints_2d_cropped", "faces"]


def stages(section: str, backbone_depth: int, decoder_depth: int) -> tuple[str, ...]:
    """The stages of a pass in execution order; a stage that is run twice is listed twice."""
    last = f"backbone.block{backbone_depth - 1:02d}.out"
    match section:
        case "00.input":
            return ("image_u8_rgb_hwc", "bbox_xyxy", "cam_int")
        case "01.body":
            blocks = [f"backbone.block00.{part}" for part in _BLOCK]
            blocks += [f"backbone.block{index:02d}.out" for index in range(backbone_depth)]
            backbone = ["patch_embed_nhwc", "tokens_in", "rope_sin", "rope_cos"]
            return (
                *_CROP,
                "image.normalized",
                "ray.full_resolution",
                *(f"backbone.{name}" for name in backbone),
                *blocks,
                "backbone.features_nchw",
                *("mask.downscaled", "mask.no_mask", "mask.selected", "cond.cliff"),
                *_DECODER_IN,
                "decoder.image_augment",
                *_layers(decoder_depth, full=True),
                *_HAND,
            )
        case "08.alternative":
            return ("crop_image_u8_hwc_opencv5",)
        case "09.out":
            return (*_PERSON, *_BODY_OUT)
        case "11.boxes":
            return ("left_xyxy", "right_xyxy")
        case "12.lhand" | "13.rhand":
            augment = ["decoder.image_augment"] if section == "12.lhand" else []
            return (
                *_CROP,
                *("backbone.patch_embed_nhwc", "backbone.tokens_in", last),
                *("backbone.features_nchw", "mask.selected", "cond.cliff"),
                *_DECODER_IN,
                *augment,
                *_layers(decoder_depth, full=False),
                *_HAND,
            )
        case "14.criteria":
            return (*_WRIST, *["prompt.keypoint_crop"] * 4)
        case "15.prompt":
            layers = _layers(decoder_depth, full=False)
            return ("keypoint_prompt", *_DECODER_IN, "decoder.image_augment", *layers)
        case "16.merge":
            first = [f"fk_in.{name}" for name in _PARAMETERS]
            second = [f"rerun_in.{name}" for name in _PARAMETERS]
            return (*first, *_RERUN, *_WRIST, *second, *_RERUN)
        case "17.locals":
            return tuple(_LOCALS)
        case "19.fullout":
            return (*_PERSON, "lhand_bbox", "rhand_bbox")
        case _:
            raise ValueError(f"no capture section {section!r}")


def _layers(depth: int, *, full: bool) -> list[str]:
    """Decoder stages: `full` has the attention parts of layer 0 and every normed output."""
    found: list[str] = []
    for index in range(depth):
        layer, final = f"decoder.layer{index:02d}", index == depth - 1
        if full and index == 0:
            found += [f"{layer}.{part}" for part in _LAYER_PARTS]
        found.append(f"{layer}.tokens_out")
        if full or final:
            found.append(f"{layer}.tokens_normed")
        head = [name for name in _HEAD if full or name != "pred_keypoints_2d_verts"]
        found += [f"head.layer{index:02d}.{name}" for name in head]
        if not final:
            found += [f"{layer}.tokens_after_kp_update", f"{layer}.augment_after_kp_updates"]
    return found


class Capture:
    """Collects the tensors of one run under their capture names.

    Args:
        backbone_depth, decoder_depth: layers of the model.
    """

    def __init__(self, backbone_depth: int, decoder_depth: int) -> None:
        self._depths = (backbone_depth, decoder_depth)
        self.tensors: dict[str, Array] = {}

    def section(self, name: str) -> Taps:
        """A collector for one pass; stages that the pass does not capture are dropped."""
        places: dict[str, list[str]] = {}
        for number, stage in enumerate(stages(name, *self._depths)):
            places.setdefault(stage, []).append(f"{name}.{number:03d}.{stage}")
        seen: dict[str, int] = {}

        def take(stage: str, array: Array) -> None:
            names: Sequence[str] = places.get(stage, ())
            turn = seen.get(stage, 0)
            if not names:
                return
            if turn == len(names):
                raise ValueError(f"{name}: stage {stage!r} was captured more often than it runs")
            seen[stage] = turn + 1
            self.tensors[names[turn]] = _plain(array)

        return take


def _plain(array: Array) -> Array:
    """Booleans as uint8, float64 as float32, everything contiguous and unshared."""
    if array.dtype == np.bool_:
        return array.astype(np.uint8)
    if array.dtype == np.float64:
        return array.astype(np.float32)
    return np.array(array, order="C")

"""Single components from recorded inputs, for diagnosis.

A case file holds tensors `head.<case>.<number>.in_<name>` and `mhr.<case>.<number>.in_<name>`;
the outputs continue the numbers. Two cases start from another's tensor: `wrist_angle` from the
angles of `fix_wrist`; `apply_correctives` of an MHR case is 1 where it is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.body.mhr import Mhr
from sam3d_gguf.runtime.body.neural import BodyNetwork, Branch, Feedback, ImageFeatures
from sam3d_gguf.runtime.body.passes import Passes
from sam3d_gguf.runtime.body.pose_head import POSE_RAW, decode_parameters
from sam3d_gguf.runtime.body.refinement import within_limits
from sam3d_gguf.runtime.geometry import camera, pose_values, rotations
from sam3d_gguf.runtime.geometry.arrays import Float32
from sam3d_gguf.schemas.errors import InputError

Array = NDArray[Any]
Inputs = Mapping[str, Array]
Outputs = list[tuple[str, Array]]

_MHR_INPUTS = ("in_identity", "in_model_params", "in_expression")
_FLAG = "apply_correctives"


@dataclass(frozen=True, slots=True)
class _Case:
    """One case: its inputs by name, and the number of its first output."""

    family: str
    name: str
    inputs: dict[str, Array]
    first_output: int


def run_cases(tensors: Mapping[str, Array], passes: Passes) -> dict[str, Array]:
    """Compute every case that `tensors` hold inputs for.

    Args:
        tensors: by name, as in a case file; tensors that are no inputs are ignored.
        passes: of a loaded model.

    Returns:
        The inputs and all outputs, by name.

    Raises:
        InputError: a case that is not known, or inputs that do not fit.
    """
    found: dict[str, Array] = {}
    for case in _cases(tensors):
        for name, array in tensors.items():
            if _belongs(name, case):
                found[name] = array
        outputs = _outputs(case, passes)
        for number, (name, array) in enumerate(outputs, case.first_output):
            found[f"{case.family}.{case.name}.{number:02d}.{name}"] = np.ascontiguousarray(array)
    return found


def _cases(tensors: Mapping[str, Array]) -> Iterable[_Case]:
    grouped: dict[tuple[str, str], dict[str, Array]] = {}
    for name, array in tensors.items():
        parts = name.split(".", 3)
        if len(parts) == 4 and parts[0] in ("head", "mhr") and _is_input(parts[3]):
            grouped.setdefault((parts[0], parts[1]), {})[parts[3]] = array
    if not grouped:
        raise InputError("the file holds no inputs of a case", expected="head.<case>.<number>.in_*")
    for (family, name), inputs in grouped.items():
        if any(key != _FLAG for key in inputs):
            first = len(inputs) + (family == "mhr" and _FLAG not in inputs)
            yield _Case(family, name, inputs, first)
    wrist = grouped.get(("head", "fix_wrist"))
    if wrist is not None:
        yield _Case("head", "wrist_angle", dict(wrist), 0)


def _is_input(name: str) -> bool:
    return name.startswith("in_") or name == _FLAG


def _belongs(name: str, case: _Case) -> bool:
    parts = name.split(".", 3)
    return len(parts) == 4 and parts[:2] == [case.family, case.name] and _is_input(parts[3])


def _outputs(case: _Case, passes: Passes) -> Outputs:
    try:
        for name, array in case.inputs.items():
            if array.size == 0 or not np.isfinite(array).all():
                raise ValueError(f"{name} is empty or not finite")
        if case.family == "mhr":
            return _mhr(case.inputs, passes.body.mhr)
        for prefix, compute in _HEAD_CASES:
            if case.name == prefix or case.name.startswith(f"{prefix}_"):
                return compute(case.inputs, passes)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"the inputs do not fit: {reason}",
            where=f"{case.family}.{case.name}",
            expected="shapes as in the captures of the original",
        ) from error
    raise InputError(f"unknown case {case.name!r}", where=case.family)


def _mhr(inputs: Inputs, mhr: Mhr) -> Outputs:
    found: Outputs = []
    correctives = bool(inputs[_FLAG].any()) if _FLAG in inputs else True
    mhr(
        inputs["in_identity"],
        inputs["in_model_params"],
        inputs.get("in_expression"),
        correctives=correctives,
        taps=lambda name, array: found.append((name, array)),
    )
    return found


def _pose_head(inputs: Inputs, passes: Passes, branch: Branch) -> Outputs:
    residual, _ = passes.network.heads(branch, inputs["in_token"])
    pose: Float32 = residual + passes.network.initial_estimate(branch)[: residual.shape[1]]
    parameters = decode_parameters(pose)
    body = passes.head(branch).pose(parameters)
    return [
        ("pred_pose_raw", pose[:, POSE_RAW]),
        ("global_rot", parameters.global_rotation),
        ("body_pose", parameters.body),
        ("shape", parameters.shape),
        ("scale", parameters.scale),
        ("hand", parameters.hand),
        ("face", parameters.face),
        ("mhr_model_params", body.model_parameters),
        ("pred_keypoints_3d", body.keypoints),
        ("pred_vertices", body.vertices),
        ("pred_joint_coords", body.joints),
        ("joint_global_rots", body.joint_rotations),
    ]


def _camera_encoder(inputs: Inputs, passes: Passes) -> Outputs:
    taps: dict[str, Array] = {}
    passes.network.ray_condition(
        "body", _features(inputs), inputs["in_rays"], taps=taps.__setitem__
    )
    return [
        ("downsampled_xyz", taps["ray.downsampled_xyz"]),
        ("fourier_99", taps["ray.fourier"]),
        ("out", taps["ray.out_features"]),
    ]


def _keypoint_update(inputs: Inputs, passes: Passes) -> Outputs:
    feedback = Feedback(inputs["in_kps_cropped"], inputs["in_depth"], inputs["in_kps3d"])
    update = passes.network.update_keypoints(
        "body", inputs["in_tokens"], inputs["in_augment"], _features(inputs), feedback
    )
    return [
        ("tokens_out", update.tokens),
        ("augment_out", update.augment_2d),
        ("augment_out_3d", update.augment),
    ]


def _features(inputs: Inputs) -> ImageFeatures:
    return ImageFeatures(np.ascontiguousarray(inputs["in_features"].transpose(0, 2, 3, 1)))


def _mask_prompt(inputs: Inputs, passes: Passes) -> Outputs:
    network = passes.network
    embeddings = network.mask_embeddings(inputs["in_mask"].astype(np.float32) * np.float32(0.25))
    scores = (("0.7", 0.7), ("0", 0.0))
    selected = [
        (
            f"selected_with_score_{text}",
            network.select_mask_embeddings(embeddings, np.full(len(embeddings), score, np.float32)),
        )
        for text, score in scores
    ]
    return [("downscaled_of_mask_times_0.25", embeddings), *selected]


def _prompt(inputs: Inputs, passes: Passes) -> Outputs:
    network: BodyNetwork = passes.network
    encoded = network.encode_prompts(inputs["in_keypoints"])
    return [
        ("embeddings", encoded.embeddings),
        ("mask", encoded.mask),
        ("token", encoded.tokens),
        ("dense_pe_8x8", network.dense_position("body", (8, 8))[None]),
        ("dense_pe_h5_w7", network.dense_position("body", (5, 7))[None]),
        ("hand_pe_h5_w7", network.dense_position("hand", (5, 7))[None]),
    ]


def _projection(inputs: Inputs, passes: Passes) -> Outputs:
    found: Outputs = []
    branches: tuple[tuple[str, Branch], ...] = (
        ("head_camera", "body"),
        ("head_camera_hand", "hand"),
    )
    for name, branch in branches:
        for own_center in (True, False):
            translation = camera.camera_translation(
                inputs["in_pred_cam"],
                inputs["in_bbox_center"],
                inputs["in_bbox_size"],
                inputs["in_img_size"],
                inputs["in_cam_int"],
                factor=passes.settings.scale_factor(branch),
                own_center=own_center,
            )
            seen = camera.project(inputs["in_points"], translation, inputs["in_cam_int"])
            prefix = f"{name}_intrin_center_{int(own_center)}"
            found += [
                (f"{prefix}.pred_cam_t", seen.translation),
                (f"{prefix}.pred_keypoints_2d", seen.points_2d),
                (f"{prefix}.pred_keypoints_2d_depth", seen.depth),
            ]
    return found


def _rotation_6d(inputs: Inputs, passes: Passes) -> Outputs:
    del passes
    values = inputs["in_6d"]
    matrix = rotations.matrix_from_6d(values)
    return [
        ("rotmat_columns_b1b2b3", matrix),
        ("euler_ZYX", rotations.euler_from_matrix("ZYX", matrix)),
    ]


def _degenerate_6d(inputs: Inputs, passes: Passes) -> Outputs:
    del passes
    return [("rotmat", rotations.matrix_from_6d(inputs["in_6d"]))]


def _collinear_6d(inputs: Inputs, passes: Passes) -> Outputs:
    del passes
    matrix = rotations.matrix_from_6d(inputs["in_6d"])
    return [
        ("rotmat", matrix),
        ("euler_ZYX", rotations.euler_from_matrix("ZYX", matrix)),
        ("euler_xyz_of_parameter_path", rotations.xyz_from_6d(inputs["in_6d"])),
    ]


def _wrist_angle(inputs: Inputs, passes: Passes) -> Outputs:
    del passes
    matrix = rotations.matrix_from_euler("XZY", inputs["in_xzy"])
    return [
        ("rotmat_XZY", matrix),
        ("angle_to_flipped_batch", rotations.angle_between(matrix, matrix[::-1])),
        ("angle_to_self", rotations.angle_between(matrix, matrix)),
        ("euler_back_XZY", rotations.euler_from_matrix("XZY", matrix)),
    ]


def _simple(
    output: str, source: str, compute: Callable[[Float32], Float32]
) -> Callable[[Inputs, Passes], Outputs]:
    return lambda inputs, passes: [(output, compute(inputs[source]))]


_HEAD_CASES: tuple[tuple[str, Callable[[Inputs, Passes], Outputs]], ...] = (
    ("body_cont_inverse", _simple("cont_260", "in_133", pose_values.body_continuous)),
    ("body_cont", _simple("euler_133", "in_260", pose_values.body_pose)),
    ("camera_encoder", _camera_encoder),
    ("fix_wrist", _simple("out_xzy", "in_xzy", within_limits)),
    ("hand_cont", _simple("euler_27", "in_54", pose_values.hand_pose)),
    ("head_pose_hand", lambda inputs, passes: _pose_head(inputs, passes, "hand")),
    ("head_pose", lambda inputs, passes: _pose_head(inputs, passes, "body")),
    ("kp_update", _keypoint_update),
    ("mask_prompt", _mask_prompt),
    ("projection", _projection),
    ("prompt", _prompt),
    ("quat", _simple("rotmat", "in_xyzw", rotations.matrix_from_quaternion)),
    ("rot6d_degenerate", _degenerate_6d),
    ("rot6d_nearly_collinear", _collinear_6d),
    ("rot6d", _rotation_6d),
    ("wrist_angle", _wrist_angle),
    ("xyz_from_6d", _simple("euler_xyz", "in_6d", rotations.xyz_from_6d)),
)

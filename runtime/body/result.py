"""What a call returns: the original's output dictionary as arrays, and the files made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.body.capture import Capture
from sam3d_gguf.runtime.body.estimator import Estimate, InferenceType, Request
from sam3d_gguf.runtime.body.mhr import MhrMesh
from sam3d_gguf.runtime.body.passes import TokenResult
from sam3d_gguf.runtime.export.gltf import GltfPerson, glb
from sam3d_gguf.runtime.export.obj import obj
from sam3d_gguf.runtime.export.overlay import overlay
from sam3d_gguf.runtime.geometry.arrays import Float32, Int32, Uint8
from sam3d_gguf.runtime.geometry.mhr_rig import MhrRig
from sam3d_gguf.runtime.output import publish_into
from sam3d_gguf.runtime.tensor_files import encode_tensors
from sam3d_gguf.runtime.vocabulary import field_metadata

Array = NDArray[Any]
_FLIP = np.array([1, -1, -1], np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class BodyResult:
    """N people in one photo.

    Attributes:
        arrays: the fields of the schema `body-output-v1` by name, people stacked along N.
        mesh: MHR's output in its own axes, cm, for exporters.
        rig: the skeleton that `mesh` is posed with.
        inference_type: how it was made.
        assumed_intrinsics: whether the camera matrix is a default and not measured.
        provenance: what it was made with.

    A field is also an item: `result["pred_vertices"]`.
    """

    arrays: dict[str, Array]
    mesh: MhrMesh
    rig: MhrRig
    inference_type: InferenceType
    assumed_intrinsics: bool
    provenance: Mapping[str, str]

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def __len__(self) -> int:
        return len(self.arrays["bbox"])

    def person(self, index: int) -> dict[str, Array]:
        """The fields of one person under the original's names, without the shared ones."""
        shared = ("cam_int", "faces")
        return {name: array[index] for name, array in self.arrays.items() if name not in shared}

    def safetensors(self) -> bytes:
        """All fields as a safetensors file, with unit, axes and space of each."""
        metadata = {
            **field_metadata("body-output-v1"),
            **self.provenance,
            "inference_type": self.inference_type,
            "intrinsics": _origin(assumed=self.assumed_intrinsics),
        }
        return b"".join(encode_tensors(self.arrays, metadata))

    def glb(self) -> bytes:
        """The people as skinned meshes on posed skeletons, binary glTF."""
        return glb(self.rig, gltf_people(self.mesh, self["pred_cam_t"]))

    def obj(self) -> bytes:
        """The posed meshes, Wavefront OBJ."""
        return obj(self.rig, list(self._seen() * _FLIP))

    def overlay(self, photo: Uint8) -> bytes:
        """A PNG of the photo, [H, W, 3] uint8 RGB, with meshes and keypoints drawn over it."""
        faces: Int32 = self.rig.faces
        return overlay(photo, self._seen(), faces, self["pred_keypoints_2d"], self["cam_int"])

    def save(self, folder: str | PathLike[str], photo: Uint8 | None = None) -> tuple[Path, ...]:
        """Write result.safetensors, mesh.glb, mesh.obj and, with the photo, overlay.png.

        Returns:
            The files written: all of them, or none.

        Raises:
            OutputError: one exists already, or the folder cannot be written.
        """
        place = Path(folder)
        files = [
            (place / "result.safetensors", [self.safetensors()]),
            (place / "mesh.glb", [self.glb()]),
            (place / "mesh.obj", [self.obj()]),
        ]
        if photo is not None:
            files.append((place / "overlay.png", [self.overlay(photo)]))
        publish_into(place, files)
        return tuple(path for path, _ in files)

    def _seen(self) -> Float32:
        """[N, V, 3] in camera space."""
        vertices: Float32 = self["pred_vertices"] + self["pred_cam_t"][:, None]
        return vertices


@dataclass(frozen=True, slots=True, eq=False)
class FeatureResult:
    """Pose tokens of N people: the fields of the schema `body-features-v1` by name."""

    arrays: dict[str, Array]
    assumed_intrinsics: bool
    provenance: Mapping[str, str]

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def safetensors(self) -> bytes:
        """All fields as a safetensors file, with unit, axes and space of each."""
        metadata = {
            **field_metadata("body-features-v1"),
            **self.provenance,
            "intrinsics": _origin(assumed=self.assumed_intrinsics),
        }
        return b"".join(encode_tensors(self.arrays, metadata))


def gltf_people(mesh: MhrMesh, translation: Float32) -> list[GltfPerson]:
    """The bodies of a mesh, each at its [N, 3] translation, as the glTF exporter takes them."""
    return [
        GltfPerson(rest, local, place)
        for rest, local, place in zip(mesh.rest, mesh.local, translation, strict=True)
    ]


def _origin(*, assumed: bool) -> str:
    return "assumed" if assumed else "given"


def body_result(
    request: Request,
    estimate: Estimate,
    rig: MhrRig,
    faces: Int32,
    inference_type: InferenceType,
    *,
    assumed: bool,
    provenance: Mapping[str, str],
    capture: Capture | None = None,
) -> BodyResult:
    """Name the arrays of an estimate.

    Args:
        faces: [F, 3] vertex indices.
        assumed: whether the intrinsics are a default.
        capture: receives the output section of a `body` or `full` run.
    """
    arrays = _arrays(request, estimate, faces)
    if capture is not None and inference_type != "hand":
        _capture_output(capture, arrays, inference_type)
    return BodyResult(arrays, estimate.body.mesh, rig, inference_type, assumed, provenance)


def feature_result(
    request: Request, tokens: TokenResult, *, assumed: bool, provenance: Mapping[str, str]
) -> FeatureResult:
    """Name the arrays of a features-only run."""
    arrays: dict[str, Array] = {
        "bbox": request.boxes,
        "pose_token": tokens.pose_token,
        "pred_cam_t": tokens.translation,
        "cam_int": request.intrinsics,
    }
    return FeatureResult(arrays, assumed, provenance)


def _arrays(request: Request, estimate: Estimate, faces: Int32) -> dict[str, Array]:
    parameters, body = estimate.parameters, estimate.body
    arrays: dict[str, Array] = {
        "bbox": estimate.boxes,
        "focal_length": estimate.focal_length,
        "pred_keypoints_3d": body.keypoints,
        "pred_keypoints_2d": estimate.keypoints_2d,
        "pred_vertices": body.vertices,
        "pred_cam_t": estimate.translation,
        "pred_pose_raw": estimate.pose_raw,
        "global_rot": parameters.global_rotation,
        "body_pose_params": parameters.body,
        "hand_pose_params": parameters.hand,
        "scale_params": parameters.scale,
        "shape_params": parameters.shape,
        "expr_params": parameters.face,
        "pred_joint_coords": body.joints,
        "pred_global_rots": estimate.joint_rotations,
        "mhr_model_params": body.model_parameters,
        "hand_box": estimate.hands.boxes,
        "hand_logits": estimate.hands.logits,
        "pred_cam": estimate.camera,
        "pred_keypoints_2d_cropped": estimate.keypoints_2d_cropped,
        "cam_int": request.intrinsics,
        "faces": faces.astype(np.int64),
    }
    if request.masks is not None:
        arrays["mask"] = request.masks
    if estimate.hand_boxes is not None and estimate.hands_accepted is not None:
        arrays["lhand_bbox"], arrays["rhand_bbox"] = estimate.hand_boxes
        arrays["hands_accepted"] = estimate.hands_accepted.astype(np.uint8)
    return arrays


def _capture_output(
    capture: Capture, arrays: dict[str, Array], inference_type: InferenceType
) -> None:
    """The output as the original's captures have it: one person's fields without the N axis."""
    taps = capture.section("09.out" if inference_type == "body" else "19.fullout")
    for name, array in arrays.items():
        alone = len(array) == 1 and name not in ("faces", "cam_int")
        value: Float32 = array[0] if alone and name != "focal_length" else array
        taps(name, value)

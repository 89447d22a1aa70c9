"""Every stage of the neural parts that the tiny fixtures hold, from the network's own values.

Only what the geometry computes between two decoder layers comes from the references, because it
is not tested here. As a program: `neural_capture.py BACKEND OUT.safetensors`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from tiny_weights import DECODER_HEADS, TINY, tiny_body, tiny_mhr

from sam3d_gguf.runtime.body.neural import (
    Branch,
    Feedback,
    FloatArray,
    ImageFeatures,
    LayerOutput,
)
from sam3d_gguf.runtime.body.neural_mhr import GgmlMhrProducts
from sam3d_gguf.runtime.body.neural_network import GgmlBodyNetwork
from sam3d_gguf.runtime.geometry.mhr_rig import skin_matrices
from sam3d_gguf.runtime.ggml.backend import Backend, BackendName, open_backend
from sam3d_gguf.runtime.ggml.graph import Node
from sam3d_gguf.runtime.ggml.library import load_library

Array = NDArray[Any]
Arrays = dict[str, Array]
FILES = ("expected", "expected-full", "head-cases", "mhr-cases")
_MEAN = np.array([0.485, 0.456, 0.406], np.float32).reshape(3, 1, 1)
_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32).reshape(3, 1, 1)
_NOT_NEURAL = ("crop.", "image.normalized", "ray.full_resolution", "cond.cliff", "keypoint_prompt")
_HEAD_STAGES = ("pose_residual_519", "pose_519", "pred_cam")


def references() -> Arrays:
    """All tensors of the fixtures by name."""
    found: Arrays = {}
    for file in FILES:
        found.update(load_file(TINY / f"{file}.safetensors"))
    return found


def stages_of(reference: Mapping[str, Array], prefix: str) -> dict[str, str]:
    """Stage name -> fixture name, of one pass or case."""
    width = len(prefix) + (5 if prefix[0].isdigit() else 4)
    return {name[width:]: name for name in reference if name.startswith(f"{prefix}.")}


def is_neural(stage: str) -> bool:
    """Whether a stage of a pass is one that the neural parts compute."""
    if stage.startswith("head."):
        return stage.split(".")[2] in _HEAD_STAGES
    return not stage.startswith(_NOT_NEURAL)


class Collector:
    """Keeps the stages of one pass under their fixture names."""

    def __init__(self, names: Mapping[str, str], into: Arrays) -> None:
        self._names = names
        self._into = into

    def __call__(self, name: str, array: NDArray[np.generic], /) -> None:
        if name in self._names:
            self._into[self._names[name]] = np.ascontiguousarray(array)


class Captures:
    """Runs all passes and cases."""

    def __init__(self, network: GgmlBodyNetwork, mhr: GgmlMhrProducts, reference: Arrays) -> None:
        self._network = network
        self._mhr = mhr
        self._reference = reference
        self.found: Arrays = {}

    def all(self) -> Arrays:
        """Every stage by its fixture name."""
        features, rays = self._body_pass()
        self._prompted_pass(features, rays)
        self._hand_pass("12.lhand")
        self._hand_pass("13.rhand")
        self._camera_encoder("camera_encoder_h80_w48")
        self._camera_encoder("camera_encoder_square")
        self._prompt_cases()
        self._mask_cases()
        self._keypoint_case()
        for case in ("correctives_on", "correctives_off", "identity_broadcast"):
            self._mhr_case(case)
        for case in ("no_expression", "zero_pose"):
            self._mhr_case(case)
        return self.found

    def _body_pass(self) -> tuple[ImageFeatures, FloatArray]:
        names = stages_of(self._reference, "01.body")
        image = self._reference[names["image.normalized"]]
        features = self._network.image_features(image, taps=Collector(names, self.found))
        rays: FloatArray = self._reference[names["ray.full_resolution"]]
        self._decode("01.body", "body", features, rays, names["prompt.keypoints_in"], None)
        return features, rays

    def _prompted_pass(self, features: ImageFeatures, rays: FloatArray) -> None:
        names = stages_of(self._reference, "15.prompt")
        previous: FloatArray = self._reference[names["decoder.prev_input"]][:, 0]
        prompt = names["keypoint_prompt"]
        self._decode("15.prompt", "body", features, rays, prompt, previous)

    def _hand_pass(self, prefix: str) -> None:
        names = stages_of(self._reference, prefix)
        pixels = self._reference[names["crop.image_u8_hwc"]].transpose(0, 3, 1, 2)
        image = (pixels.astype(np.float32) / np.float32(255) - _MEAN) / _DEVIATION
        features = self._network.image_features(image, taps=Collector(names, self.found))
        affine = self._reference[names["crop.affine_trans"]][0]
        camera = self._reference["00.input.002.cam_int"]
        grid = np.arange(pixels.shape[2], dtype=np.float32)
        axes = [
            (grid / affine[i, i] - affine[i, 2] / affine[i, i] - camera[i, 2]) / camera[i, i]
            for i in range(2)
        ]
        rays = np.stack(np.meshgrid(*axes))[None]
        self._decode(prefix, "hand", features, rays, names["prompt.keypoints_in"], None)

    def _decode(
        self,
        prefix: str,
        branch: Branch,
        features: ImageFeatures,
        rays: FloatArray,
        prompt: str,
        previous: FloatArray | None,
    ) -> None:
        names = stages_of(self._reference, prefix)
        condition = "01.body" if prefix == "15.prompt" else prefix
        cliff = stages_of(self._reference, condition)["cond.cliff"]

        def feedback(output: LayerOutput) -> Feedback:
            stage = f"head.layer{output.layer:02d}"
            pose = output.pose.copy()
            pose[:, -72:] = 0  # the fixture holds the face already zeroed
            self.found[names[f"{stage}.pose_519"]] = pose
            self.found[names[f"{stage}.pred_cam"]] = output.camera
            given = (
                self._reference[names[f"{stage}.{name}"]]
                for name in (
                    "pred_keypoints_2d_cropped",
                    "pred_keypoints_2d_depth",
                    "pred_keypoints_3d",
                )
            )
            return Feedback(*given)

        self._network.decode(
            branch,
            features,
            rays,
            self._reference[cliff],
            self._reference[prompt],
            feedback,
            previous,
            taps=Collector(names, self.found),
        )

    def _camera_encoder(self, case: str) -> None:
        names = stages_of(self._reference, f"head.{case}")
        taps = {
            "ray.downsampled_xyz": names["downsampled_xyz"],
            "ray.fourier": names["fourier_99"],
            "ray.out_features": names["out"],
        }
        features = _channels_last(self._reference[names["in_features"]])
        rays: FloatArray = self._reference[names["in_rays"]]
        self._network.ray_condition("body", features, rays, taps=Collector(taps, self.found))

    def _prompt_cases(self) -> None:
        names = stages_of(self._reference, "head.prompt")
        encoded = self._network.encode_prompts(self._reference[names["in_keypoints"]])
        self.found[names["embeddings"]] = encoded.embeddings
        self.found[names["mask"]] = encoded.mask
        self.found[names["token"]] = encoded.tokens
        position = self._network.dense_position
        self.found[names["dense_pe_8x8"]] = position("body", (8, 8))[None]
        self.found[names["dense_pe_h5_w7"]] = position("body", (5, 7))[None]
        self.found[names["hand_pe_h5_w7"]] = position("hand", (5, 7))[None]

    def _mask_cases(self) -> None:
        names = stages_of(self._reference, "head.mask_prompt")
        mask = self._reference[names["in_mask"]].astype(np.float32) * np.float32(0.25)
        embeddings = self._network.mask_embeddings(mask)
        self.found[names["downscaled_of_mask_times_0.25"]] = embeddings
        for score in (0.7, 0):
            selected = self._network.select_mask_embeddings(
                embeddings, np.array([score], np.float32)
            )
            self.found[names[f"selected_with_score_{score}"]] = selected

    def _keypoint_case(self) -> None:
        names = stages_of(self._reference, "head.kp_update")
        tokens, augment, features, cropped, depth, points = (
            self._reference[names[name]]
            for name in (
                "in_tokens",
                "in_augment",
                "in_features",
                "in_kps_cropped",
                "in_depth",
                "in_kps3d",
            )
        )
        update = self._network.update_keypoints(
            "body", tokens, augment, _channels_last(features), Feedback(cropped, depth, points)
        )
        self.found[names["tokens_out"]] = update.tokens
        self.found[names["augment_out"]] = update.augment_2d
        self.found[names["augment_out_3d"]] = update.augment

    def _mhr_case(self, case: str) -> None:
        names = stages_of(self._reference, f"mhr.{case}")
        given = {stage: self._reference[name] for stage, name in names.items()}
        parameters = given["in_model_params"]
        self.found[names["joint_parameters"]] = self._mhr.joint_parameters(parameters)
        states = given["global_skel_state"]
        mesh = self._mhr.mesh(
            np.ascontiguousarray(np.broadcast_to(given["in_identity"], (len(parameters), 45))),
            given.get("in_expression"),
            given.get("pose_features"),
            skin_matrices(tiny_mhr().array("skin.inverse_bind"), states),
            taps=Collector(names, self.found),
        )
        self.found[names["unposed"]], self.found[names["vertices"]] = mesh.rest, mesh.posed


def expected_names(reference: Mapping[str, Array]) -> Iterator[str]:
    """The fixture tensors that `Captures` must find."""
    for prefix in ("01.body", "12.lhand", "13.rhand", "15.prompt"):
        names = stages_of(reference, prefix)
        yield from (name for stage, name in names.items() if is_neural(stage))
    for case in ("camera_encoder_h80_w48", "camera_encoder_square", "prompt", "mask_prompt"):
        names = stages_of(reference, f"head.{case}")
        yield from (name for stage, name in names.items() if not stage.startswith("in_"))
    yield from (
        name for name in reference if name.startswith("head.kp_update.") and "in_" not in name
    )
    products = ("rest_", "joint_parameters", "corrective_", "unposed", "vertices")
    for name in reference:
        if name.startswith("mhr.") and name.split(".", 3)[3].startswith(products):
            yield name


def capture(backend: Backend) -> tuple[Arrays, tuple[Node, ...]]:
    """All stages on a backend, and the nodes of all graphs that ran."""
    with (
        GgmlBodyNetwork(backend, tiny_body(), decoder_heads=DECODER_HEADS) as network,
        GgmlMhrProducts(backend, tiny_mhr()) as mhr,
    ):
        found = Captures(network, mhr, references()).all()
        nodes = [node for graph in (*network.graphs(), *mhr.graphs()) for node in graph.nodes()]
    return found, tuple(nodes)


def _channels_last(features: Array) -> ImageFeatures:
    return ImageFeatures(np.ascontiguousarray(features.transpose(0, 2, 3, 1)))


def main() -> None:
    """Write the stages; print the names of the buffers that they were computed in."""
    backend: BackendName = "vulkan" if sys.argv[1] == "vulkan" else "cpu"
    with open_backend(load_library(), backend) as opened:
        found, nodes = capture(opened)
    save_file(found, Path(sys.argv[2]))
    print(*sorted({node.buffer for node in nodes}))


if __name__ == "__main__":
    main()

"""The promptable decoder with its heads and keypoint tokens, for both branches.

Source: facebookresearch/sam-3d-body b5c765a0, `promptable_decoder.py`, `transformer.py` and
`sam3d_body.py` (forward_decoder, keypoint_token_update_fn, keypoint3d_token_update_fn).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.body.neural import (
    CAMERA_VALUES,
    KEYPOINTS,
    POSE_VALUES,
    Branch,
    DecoderResult,
    Feedback,
    FeedbackFunction,
    FloatArray,
    ImageFeatures,
    KeypointUpdate,
    LayerOutput,
)
from sam3d_gguf.runtime.body.neural_backbone import channels_first
from sam3d_gguf.runtime.body.neural_parts import BodyDimensions, ffn
from sam3d_gguf.runtime.body.neural_prompts import SUFFIX, Encoders
from sam3d_gguf.runtime.body.neural_sampling import bilinear_sample
from sam3d_gguf.runtime.ggml.network import Network, Parts, Taps
from sam3d_gguf.runtime.ggml.store import Tensor
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import InputError

PELVIS = (9, 10)
MIN_DEPTH = 1e-5
_BOX_LAYERS = 3


@dataclass(frozen=True, slots=True)
class _Tables:
    """The learned rows that enter a branch's tokens as they are."""

    initial: FloatArray
    keypoints: FloatArray
    keypoints_3d: FloatArray
    hand_boxes: FloatArray


@dataclass(frozen=True, slots=True)
class _Context:
    """What all layers of a pass attend to."""

    features: ImageFeatures
    flat: FloatArray
    position: FloatArray


class Decoder:
    """One branch's decoder."""

    def __init__(
        self,
        branch: Branch,
        parts: Parts,
        encoders: Encoders,
        weights: Weights,
        dimensions: BodyDimensions,
    ) -> None:
        self._branch: Branch = branch
        self._suffix = SUFFIX[branch]
        self._parts = parts
        self._encoders = encoders
        self._dimensions = dimensions
        suffix = self._suffix
        self._tables = _Tables(
            initial=np.concatenate(
                [
                    weights.array(f"init_pose{suffix}.weight")[0],
                    weights.array(f"init_camera{suffix}.weight")[0],
                ]
            ),
            keypoints=weights.array(f"keypoint_embedding{suffix}.weight"),
            keypoints_3d=weights.array(f"keypoint3d_embedding{suffix}.weight"),
            hand_boxes=weights.array("hand_box_embedding.weight"),
        )

    @property
    def initial(self) -> FloatArray:
        """[522]: initial pose | initial camera."""
        return self._tables.initial

    def decode(
        self,
        features: ImageFeatures,
        rays: FloatArray,
        condition: FloatArray,
        prompts: FloatArray,
        feedback: FeedbackFunction,
        previous: FloatArray | None,
        hand_tokens: bool,
        taps: Taps | None,
    ) -> DecoderResult:
        """One pass; see `BodyNetwork.decode`."""
        batch, height, width, channels = features.values.shape
        _check_shape("condition", condition, (batch, 3))
        _check_shape("prompts", prompts, (batch, prompts.shape[1], 3))
        tokens, augment, first_hand = self._first_tokens(
            features, rays, condition, prompts, previous, hand_tokens, taps
        )
        conditioned = self._encoders.ray_condition(self._branch, features, rays, None)
        context = _Context(
            conditioned,
            conditioned.values.reshape(batch, height * width, channels),
            self._encoders.dense_position(self._branch, (height, width))[None],
        )
        boxes: tuple[FloatArray, FloatArray] | None = None
        output: LayerOutput | None = None
        last = self._dimensions.decoder_depth - 1
        for layer in range(last + 1):
            hand = first_hand if layer == last and hand_tokens else None
            tokens, output, boxes = self._layer(layer, tokens, augment, context, hand, taps)
            prediction = feedback(output)
            if layer < last:
                update = self.update_keypoints(tokens, augment, context.features, prediction)
                tokens, augment = update.tokens, update.augment
                if taps is not None:
                    taps(f"decoder.layer{layer:02d}.tokens_after_kp_update", tokens)
                    taps(f"decoder.layer{layer:02d}.augment_after_kp_updates", augment)
        if output is None:
            raise InputError("the decoder has no layers")
        if boxes is not None and taps is not None:
            taps("hand.box_logits", boxes[0])
            taps("hand.cls_logits", boxes[1])
        return DecoderResult(output, *(boxes or (None, None)))

    def heads(self, pose_token: FloatArray) -> tuple[FloatArray, FloatArray]:
        """[B, DIM] to the MLP outputs of pose [B, 519] and camera [B, 3]."""

        def build(network: Network) -> None:
            self._add_heads(network, network.tensors["token"])

        results = self._parts.run(f"heads{self._suffix}", {"token": pose_token}, build)
        return results["pose"], results["camera"]

    def update_keypoints(
        self,
        tokens: FloatArray,
        augment: FloatArray,
        features: ImageFeatures,
        feedback: Feedback,
    ) -> KeypointUpdate:
        """Puts a layer's prediction into the keypoint tokens, which are the last 140."""
        cropped, depth = feedback.keypoints_2d_cropped, feedback.keypoints_2d_depth
        unit = cropped + np.float32(0.5)
        outside = np.any((unit < 0) | (unit > 1), axis=2)
        valid = ~(outside | (depth < np.float32(MIN_DEPTH)))[..., None]
        sampled = bilinear_sample(features.values, cropped * np.float32(2)) * valid
        points = feedback.keypoints_3d
        pelvis = (points[:, PELVIS[0]] + points[:, PELVIS[1]]) * np.float32(0.5)
        centred: FloatArray = np.subtract(points, pelvis[:, None], dtype=np.float32)
        results = self._embed_keypoints(cropped, sampled, centred)
        rows = slice(-2 * KEYPOINTS, -KEYPOINTS)
        updated = tokens.copy()
        updated[:, rows] += results["features"]
        augment_2d = augment.copy()
        augment_2d[:, rows] = results["positions"] * valid
        augment_3d = augment_2d.copy()
        augment_3d[:, -KEYPOINTS:] = results["positions_3d"]
        return KeypointUpdate(updated, augment_2d, augment_3d)

    def _embed_keypoints(
        self, cropped: FloatArray, sampled: FloatArray, points: FloatArray
    ) -> dict[str, FloatArray]:
        suffix = self._suffix

        def build(network: Network) -> None:
            inputs = network.tensors
            network.output(
                "positions", ffn(network, inputs["cropped"], f"keypoint_posemb_linear{suffix}")
            )
            network.output(
                "features", network.dense(inputs["sampled"], f"keypoint_feat_linear{suffix}")
            )
            network.output(
                "positions_3d", ffn(network, inputs["points"], f"keypoint3d_posemb_linear{suffix}")
            )

        inputs = {"cropped": cropped, "sampled": sampled, "points": points}
        return self._parts.run(f"keypoint_update{suffix}", inputs, build)

    def _first_tokens(
        self,
        features: ImageFeatures,
        rays: FloatArray,
        condition: FloatArray,
        prompts: FloatArray,
        previous: FloatArray | None,
        hand_tokens: bool,
        taps: Taps | None,
    ) -> tuple[FloatArray, FloatArray, int]:
        """Tokens, their position terms, and where the hand tokens start."""
        batch = len(condition)
        initial = np.broadcast_to(self.initial, (batch, len(self.initial)))
        init_input = np.concatenate([condition, initial], axis=1)[:, None]
        prev_input = (initial if previous is None else previous)[:, None]
        _check_shape("previous estimate", prev_input, (batch, 1, POSE_VALUES + CAMERA_VALUES))
        embedded = self._embed_estimates(init_input, prev_input)
        if taps is not None:
            taps("decoder.init_input", init_input)
            taps("decoder.init_token", embedded["init"])
            taps("decoder.prev_input", prev_input)
            taps("decoder.prev_token", embedded["prev"])
            self._encoders.ray_condition(self._branch, features, rays, taps)
        encoded = self._encoders.prompts(prompts)
        tables = self._tables
        learned = [tables.keypoints, tables.keypoints_3d]
        if hand_tokens:
            learned.insert(0, tables.hand_boxes)
        rows = np.concatenate(learned)
        prompted = np.concatenate([embedded["prev"], encoded.tokens], axis=1)
        tokens = np.concatenate(
            [embedded["init"], prompted, np.broadcast_to(rows, (batch, *rows.shape))], axis=1
        )
        augment = np.zeros_like(tokens)
        augment[:, 1 : 1 + prompted.shape[1]] = prompted
        if taps is not None:
            taps("prompt.keypoints_in", prompts)
            taps("prompt.embedding", encoded.embeddings)
            taps("prompt.mask", encoded.mask)
            taps("prompt.token", encoded.tokens)
            taps("decoder.tokens_in", tokens)
            taps("decoder.token_augment_in", augment)
            grid = features.values.shape[1:3]
            position = self._encoders.dense_position(self._branch, (grid[0], grid[1]))
            taps("decoder.image_augment", channels_first(position.reshape(1, *grid, -1)))
        return tokens, augment, 1 + prompted.shape[1]

    def _embed_estimates(
        self, init_input: FloatArray, prev_input: FloatArray
    ) -> dict[str, FloatArray]:
        suffix = self._suffix

        def build(network: Network) -> None:
            inputs = network.tensors
            network.output("init", network.dense(inputs["init"], f"init_to_token_mhr{suffix}"))
            network.output("prev", network.dense(inputs["prev"], f"prev_to_token_mhr{suffix}"))

        return self._parts.run(
            f"estimates{suffix}", {"init": init_input, "prev": prev_input}, build
        )

    def _layer(
        self,
        layer: int,
        tokens: FloatArray,
        augment: FloatArray,
        context: _Context,
        hand: int | None,
        taps: Taps | None,
    ) -> tuple[FloatArray, LayerOutput, tuple[FloatArray, FloatArray] | None]:
        """One layer with its heads; `hand` is where the hand tokens start if they are read."""
        stage = f"decoder.layer{layer:02d}"

        def build(network: Network) -> None:
            with network.scope(stage):
                self._add_layer(network, layer, hand)

        results = self._parts.run(
            f"{stage}{self._suffix}",
            {
                "tokens": tokens,
                "augment": augment,
                "context": context.flat,
                "position": context.position,
            },
            build,
            taps=taps,
            variant=hand,
        )
        pose, camera = results["pose"], results["camera"]
        output = LayerOutput(
            layer=layer,
            last=layer == self._dimensions.decoder_depth - 1,
            pose_token=results["pose_token"],
            pose_residual=pose,
            pose=pose + self.initial[:POSE_VALUES],
            camera=camera + self.initial[POSE_VALUES:],
        )
        if taps is not None:
            for name, array in results.items():
                if name.startswith(stage):
                    taps(name, array)
            taps(f"head.layer{layer:02d}.pose_residual_519", pose)
        boxes = None if hand is None else (results["boxes"], results["classes"])
        return results["tokens"], output, boxes

    def _add_layer(self, network: Network, layer: int, hand: int | None) -> None:
        module = f"decoder{self._suffix}.layers.{layer}"
        stage = f"decoder.layer{layer:02d}"
        x, context = network.tensors["tokens"], network.tensors["context"]

        def detail(name: str, tensor: Tensor) -> Tensor:
            """The inside of the first layer only, as the reference captures have it."""
            return network.tap(f"{stage}.{name}", tensor) if layer == 0 else tensor

        x_pe = detail("x_pe_normed", network.norm(network.tensors["augment"], f"{module}.ln_pe_1"))
        context_pe = detail(
            "context_pe_normed", network.norm(network.tensors["position"], f"{module}.ln_pe_2")
        )
        v = network.norm(x, f"{module}.ln1")
        q = v if layer == 0 else network.add(v, x_pe)
        attended = self._attention(network, f"{module}.self_attn", q, q, v)
        x = network.add(x, detail("self_attn", attended))
        q = network.add(network.norm(x, f"{module}.ln2_1"), x_pe)
        v = network.norm(context, f"{module}.ln2_2")
        k = network.add(v, context_pe)
        attended = self._attention(network, f"{module}.cross_attn", q, k, v)
        x = network.add(x, detail("cross_attn", attended))
        hidden = network.dense(network.norm(x, f"{module}.ln3"), f"{module}.ffn.layers.0.0")
        x = network.add(x, network.dense(network.gelu(hidden), f"{module}.ffn.layers.1"))
        network.output("tokens", network.tap(f"{stage}.tokens_out", x))
        normed = network.tap(
            f"{stage}.tokens_normed", network.norm(x, f"decoder{self._suffix}.norm_final")
        )
        batch, _, width = normed.shape
        token = network.reshape(network.narrow(normed, 1, 0, 1), (batch, width))
        network.output("pose_token", network.contiguous(token))
        self._add_heads(network, token)
        if hand is not None:
            _add_hand_boxes(network, network.narrow(normed, 1, hand, 2))

    def _attention(self, network: Network, module: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = self._dimensions.decoder_heads

        def split(x: Tensor, name: str) -> Tensor:
            projected = network.dense(x, f"{module}.{name}_proj")
            view = network.split_heads(projected, 0, projected.shape[2], heads)
            return network.permute(view, (0, 2, 1, 3))

        attended = network.attention(split(q, "q"), split(k, "k"), split(v, "v"))
        return network.dense(attended, f"{module}.proj")

    def _add_heads(self, network: Network, token: Tensor) -> None:
        network.output("pose", ffn(network, token, f"head_pose{self._suffix}.proj"))
        network.output("camera", ffn(network, token, f"head_camera{self._suffix}.proj"))


def _add_hand_boxes(network: Network, tokens: Tensor) -> None:
    """Both branches share these heads."""
    tokens = network.contiguous(tokens)
    x = tokens
    for index in range(_BOX_LAYERS):
        x = network.dense(x, f"bbox_embed.layers.{index}")
        x = network.relu(x) if index < _BOX_LAYERS - 1 else x
    network.output("boxes", x)
    network.output("classes", network.dense(tokens, "hand_cls_embed"))


def _check_shape(name: str, array: FloatArray, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise InputError(f"the {name} has the shape {array.shape}", expected=str(shape))

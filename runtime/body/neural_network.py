"""`BodyNetwork` on GGML."""

from __future__ import annotations

import numpy as np

from sam3d_gguf.runtime.body.neural import (
    Branch,
    DecoderResult,
    Feedback,
    FeedbackFunction,
    FloatArray,
    ImageFeatures,
    KeypointUpdate,
    PromptEncoding,
)
from sam3d_gguf.runtime.body.neural_backbone import backbone_features, channels_first
from sam3d_gguf.runtime.body.neural_decoder import Decoder
from sam3d_gguf.runtime.body.neural_parts import ENCODER, BodyDimensions, body_store
from sam3d_gguf.runtime.body.neural_prompts import SUFFIX, Encoders
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.graph import Graph
from sam3d_gguf.runtime.ggml.network import Network, Parts, Taps
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.closing import Closing


class GgmlBodyNetwork(Closing):
    """The neural parts of SAM 3D Body on one device. See `BodyNetwork` for the methods.

        with GgmlBodyNetwork(backend, weights, decoder_heads=8) as network:
            features = network.image_features(image)

    Not safe for concurrent calls, except `cancel`.
    """

    def __init__(self, backend: Backend, weights: Weights, *, decoder_heads: int) -> None:
        """Places the weights on the device.

        Args:
            weights: a checked GGUF, tensors under the checkpoint's names.
            decoder_heads: MODEL.DECODER.HEADS of the configuration.

        Raises:
            ContractError: a tensor is missing.
            BackendError: the device has too little memory.
        """
        self.backend = backend
        self.dimensions = BodyDimensions.of(weights, decoder_heads)
        self._periods: FloatArray = weights.array(f"{ENCODER}.rope_embed.periods")
        self._parts = Parts(body_store(backend, weights), backend)
        self._encoders = Encoders(self._parts, weights, self.dimensions)
        self._decoders: dict[Branch, Decoder] = {
            branch: Decoder(branch, self._parts, self._encoders, weights, self.dimensions)
            for branch in SUFFIX
        }

    def image_features(
        self,
        image: FloatArray,
        mask: FloatArray | None = None,
        mask_score: FloatArray | None = None,
        *,
        taps: Taps | None = None,
    ) -> ImageFeatures:
        """The backbone and the mask prompt."""
        features = backbone_features(self._parts, self.dimensions, self._periods, image, taps)
        batch = len(image)
        score = np.zeros(batch, np.float32) if mask_score is None else mask_score
        if mask is None:
            mask = np.zeros((batch, 1, *image.shape[2:]), np.float32)
        if taps is None and not np.any(score > 0):
            return ImageFeatures(features + self._encoders.no_mask)
        downscaled = self._encoders.mask(mask)
        selected = self._encoders.select_mask(downscaled, score)
        if taps is not None:
            no_mask = np.broadcast_to(self._encoders.no_mask, downscaled.shape)
            taps("mask.downscaled", channels_first(downscaled))
            taps("mask.no_mask", channels_first(no_mask))
            taps("mask.selected", channels_first(selected))
        return ImageFeatures(features + selected)

    def decode(
        self,
        branch: Branch,
        features: ImageFeatures,
        rays: FloatArray,
        condition: FloatArray,
        prompts: FloatArray,
        feedback: FeedbackFunction,
        previous: FloatArray | None = None,
        *,
        hand_tokens: bool = True,
        taps: Taps | None = None,
    ) -> DecoderResult:
        """One pass of a branch's decoder."""
        return self._decoders[branch].decode(
            features, rays, condition, prompts, feedback, previous, hand_tokens, taps
        )

    def initial_estimate(self, branch: Branch) -> FloatArray:
        """[522]: initial pose 519 | initial camera 3."""
        return self._decoders[branch].initial

    def heads(self, branch: Branch, pose_token: FloatArray) -> tuple[FloatArray, FloatArray]:
        """[B, DIM] to the MLP outputs of the pose head [B, 519] and the camera head [B, 3]."""
        return self._decoders[branch].heads(pose_token)

    def ray_condition(
        self,
        branch: Branch,
        features: ImageFeatures,
        rays: FloatArray,
        *,
        taps: Taps | None = None,
    ) -> ImageFeatures:
        """The camera encoder alone."""
        return self._encoders.ray_condition(branch, features, rays, taps)

    def encode_prompts(self, prompts: FloatArray) -> PromptEncoding:
        """The prompt encoder alone."""
        return self._encoders.prompts(prompts)

    def dense_position(self, branch: Branch, grid: tuple[int, int]) -> FloatArray:
        """[C, grid height, grid width]."""
        position = self._encoders.dense_position(branch, grid)
        encoding: FloatArray = channels_first(position.reshape(1, *grid, -1))[0]
        return encoding

    def mask_embeddings(self, mask: FloatArray) -> FloatArray:
        """[B, 1, H, W] to [B, C, H / 16, W / 16]."""
        return channels_first(self._encoders.mask(mask))

    def select_mask_embeddings(self, embeddings: FloatArray, score: FloatArray) -> FloatArray:
        """[B, C, h, w]: score times the embeddings where the [B] score is above 0, else no-mask."""
        last = embeddings.transpose(0, 2, 3, 1)
        return channels_first(self._encoders.select_mask(last, score))

    def update_keypoints(
        self,
        branch: Branch,
        tokens: FloatArray,
        augment: FloatArray,
        features: ImageFeatures,
        feedback: Feedback,
    ) -> KeypointUpdate:
        """The feedback of a layer alone."""
        return self._decoders[branch].update_keypoints(tokens, augment, features, feedback)

    def scales(self, branch: Branch, scale: FloatArray) -> FloatArray:
        """[B, 28] scale coefficients to [B, 68] MHR scales."""
        return self._head_product(branch, scale, "scale_comps", "scale_mean")

    def hand_pose(self, branch: Branch, hand: FloatArray) -> FloatArray:
        """[B, 54] of one hand to its continuous pose [B, 54]."""
        return self._head_product(branch, hand, "hand_pose_comps", "hand_pose_mean")

    def keypoints(self, branch: Branch, points: FloatArray) -> FloatArray:
        """[B, V + 127, 3] vertices | joints to [B, 308, 3] keypoints."""
        rows = points.transpose(0, 2, 1).reshape(-1, points.shape[1])
        mapped = self._head_product(branch, rows, "keypoint_mapping", None)
        return np.ascontiguousarray(mapped.reshape(len(points), 3, -1).transpose(0, 2, 1))

    def _head_product(
        self, branch: Branch, x: FloatArray, matrix: str, mean: str | None
    ) -> FloatArray:
        module = f"head_pose{SUFFIX[branch]}"

        def build(network: Network) -> None:
            bias = None if mean is None else network.weight(f"{module}.{mean}")
            weight = network.weight(f"{module}.{matrix}")
            network.output("y", network.linear(network.tensors["x"], weight, bias))

        return self._parts.run(f"{module}.{matrix}", {"x": x}, build)["y"]

    def cancel(self) -> None:
        """Ends the current or next run before its next stage. Any thread may call it."""
        self._parts.cancel()

    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that were built so far."""
        return self._parts.graphs.all()

    def memory(self) -> dict[str, int]:
        """Bytes of weights, and of intermediates."""
        return self._parts.memory()

    def close(self) -> None:
        """Frees graphs and weights; the backend stays open."""
        self._parts.close()

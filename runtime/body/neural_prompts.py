"""The encoders beside the backbone: mask, rays, prompts and dense positions.

Source: facebookresearch/sam-3d-body b5c765a0, `prompt_encoder.py` and `camera_embed.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sam3d_gguf.runtime.body.neural import (
    KEYPOINTS,
    Branch,
    FloatArray,
    ImageFeatures,
    PromptEncoding,
)
from sam3d_gguf.runtime.body.neural_backbone import channels_first
from sam3d_gguf.runtime.body.neural_parts import BodyDimensions
from sam3d_gguf.runtime.body.neural_sampling import (
    downsample_rays,
    fourier_features,
    sine_cosine,
)
from sam3d_gguf.runtime.ggml.network import Network, Parts, Taps
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import InputError

SUFFIX: Mapping[Branch, str] = {"body": "", "hand": "_hand"}
POSITION_MATRIX: Mapping[Branch, str] = {
    "body": "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix",
    "hand": "hand_pe_layer.positional_encoding_gaussian_matrix",
}
DUMMY_LABEL = -2
WRONG_LABEL = -1

_MASK = "prompt_encoder.mask_downscaling"
_MASK_STRIDE = 16
_MASK_STAGES = ((0, 1), (3, 4), (6, 7), (9, 10))
_MASK_PROJECTION = 12


class Encoders:
    """The encoders of one model."""

    def __init__(self, parts: Parts, weights: Weights, dimensions: BodyDimensions) -> None:
        self._parts = parts
        self._dimensions = dimensions
        self.no_mask: FloatArray = weights.array("prompt_encoder.no_mask_embed.weight")[0]
        encoder = "prompt_encoder"
        self._invalid: FloatArray = weights.array(f"{encoder}.invalid_point_embed.weight")[0]
        self._wrong: FloatArray = weights.array(f"{encoder}.not_a_point_embed.weight")[0]
        self._points: FloatArray = np.concatenate(
            [weights.array(f"{encoder}.point_embeddings.{i}.weight") for i in range(KEYPOINTS)]
        )
        self._dense: dict[tuple[Branch, tuple[int, int]], FloatArray] = {}

    def mask(self, mask: FloatArray) -> FloatArray:
        """[B, 1, H, W] to [B, H / 16, W / 16, C].

        Raises:
            InputError: the mask is not of whole patches.
        """
        batch, channels, height, width = mask.shape
        if channels != 1 or not height or not width or height % 16 or width % 16:
            raise InputError(
                f"the mask has the shape {mask.shape}",
                expected="[B, 1, H, W] with H and W multiples of 16",
            )
        grid = (height // _MASK_STRIDE, width // _MASK_STRIDE)

        def build(network: Network) -> None:
            x = network.tensors["pixels"]
            for convolution, norm in _MASK_STAGES:
                kernel = network.weight(f"{_MASK}.{convolution}.weight")
                outputs, inputs = kernel.shape[:2]
                # Each convolution's 2x2 windows are neighbours in memory: see _nested_order.
                x = network.reshape(x, (x.shape[0] // 4, 4 * inputs))
                window = network.permute(kernel, (0, 2, 3, 1))
                x = network.linear(
                    x,
                    network.reshape(window, (outputs, 4 * inputs)),
                    network.weight(f"{_MASK}.{convolution}.bias"),
                )
                x = network.gelu(network.norm(x, f"{_MASK}.{norm}"))
            kernel = network.weight(f"{_MASK}.{_MASK_PROJECTION}.weight")
            x = network.linear(
                x,
                network.reshape(kernel, kernel.shape[:2]),
                network.weight(f"{_MASK}.{_MASK_PROJECTION}.bias"),
            )
            network.output("embeddings", x)

        pixels = _nested_order(mask, grid)
        results = self._parts.run("mask", {"pixels": pixels}, build)
        return results["embeddings"].reshape(batch, *grid, self._dimensions.channels)

    def select_mask(self, embeddings: FloatArray, score: FloatArray) -> FloatArray:
        """[B, h, w, C]: score times the embeddings where the [B] score is above 0, else no-mask."""
        chosen = score[:, None, None, None]
        return np.where(chosen > 0, chosen * embeddings, self.no_mask)

    def ray_condition(
        self, branch: Branch, features: ImageFeatures, rays: FloatArray, taps: Taps | None
    ) -> ImageFeatures:
        """Features conditioned on the rays of their crop.

        Raises:
            InputError: the rays do not cover the patches.
        """
        batch, height, width, channels = features.values.shape
        patch = self._dimensions.patch
        if rays.shape != (batch, 2, height * patch, width * patch):
            raise InputError(
                f"the rays have the shape {rays.shape}",
                expected=str((batch, 2, height * patch, width * patch)),
            )
        module = f"ray_cond_emb{SUFFIX[branch]}"
        positions = downsample_rays(rays, patch)
        fourier = fourier_features(positions)

        def build(network: Network) -> None:
            kernel = network.weight(f"{module}.conv.weight")
            kernel = network.reshape(kernel, kernel.shape[:2])
            # Two products instead of one over the joined channels, whose number is odd.
            x = network.add(
                network.matmul(network.tensors["features"], network.narrow(kernel, 1, 0, channels)),
                network.matmul(
                    network.tensors["rays"],
                    network.narrow(kernel, 1, channels, fourier.shape[2]),
                ),
            )
            network.output("conditioned", network.norm(x, f"{module}.norm"))

        flat = features.values.reshape(batch, height * width, channels)
        results = self._parts.run(module, {"features": flat, "rays": fourier}, build)
        conditioned = results["conditioned"].reshape(features.values.shape)
        if taps is not None:
            taps("ray.downsampled_xyz", positions)
            taps("ray.fourier", fourier)
            taps("ray.embedding_in_features", channels_first(features.values))
            taps("ray.out_features", channels_first(conditioned))
        return ImageFeatures(conditioned)

    def prompts(self, prompts: FloatArray) -> PromptEncoding:
        """Point prompts as tokens.

        Raises:
            InputError: a coordinate is outside 0..1 or a label is not one of -2..69.
        """
        _check_prompts(prompts)
        embeddings = sine_cosine(self._positions("body", prompts[..., :2]))
        labels = prompts[..., 2].astype(np.int64)
        embeddings[labels == DUMMY_LABEL] = self._invalid
        embeddings[labels == WRONG_LABEL] = self._wrong
        keypoint = labels >= 0
        embeddings[keypoint] += self._points[labels[keypoint]]

        def build(network: Network) -> None:
            network.output(
                "tokens", network.dense(network.tensors["embeddings"], "prompt_to_token")
            )

        results = self._parts.run("prompt_to_token", {"embeddings": embeddings}, build)
        mask = (labels > DUMMY_LABEL).astype(np.float32)
        return PromptEncoding(embeddings, mask, results["tokens"])

    def dense_position(self, branch: Branch, grid: tuple[int, int]) -> FloatArray:
        """[patches, C]: the encoding of every patch centre; computed once per grid."""
        known = self._dense.get((branch, grid))
        if known is None:
            height, width = grid
            rows = (np.arange(height, dtype=np.float32) + np.float32(0.5)) / np.float32(height)
            columns = (np.arange(width, dtype=np.float32) + np.float32(0.5)) / np.float32(width)
            y, x = np.meshgrid(rows, columns, indexing="ij")
            centres = np.stack([x.ravel(), y.ravel()], axis=1)[None]
            known = sine_cosine(self._positions(branch, centres))[0]
            self._dense[branch, grid] = known
        return known

    def _positions(self, branch: Branch, points: FloatArray) -> FloatArray:
        """[B, N, 2] in 0..1, as -1..1, times the branch's random frequencies: [B, N, C / 2]."""

        def build(network: Network) -> None:
            matrix = network.weight(POSITION_MATRIX[branch])
            network.output("products", network.matmul(network.tensors["points"], matrix))

        signed = np.float32(2) * points - np.float32(1)
        return self._parts.run(f"positions.{branch}", {"points": signed}, build)["products"]


def _check_prompts(prompts: FloatArray) -> None:
    points, labels = prompts[..., :2], prompts[..., 2]
    if not (np.all(points >= 0) and np.all(points <= 1)):
        raise InputError("a prompt is outside of the crop", expected="x and y in 0..1")
    if not np.all((labels == np.floor(labels)) & (labels >= DUMMY_LABEL) & (labels < KEYPOINTS)):
        raise InputError("a prompt has an unknown label", expected=f"-2..{KEYPOINTS - 1}")


def _nested_order(mask: FloatArray, grid: tuple[int, int]) -> FloatArray:
    """Pixels so that four halvings of 2x2 windows take neighbours: [pixels, 1].

    Patches row-major; inside a patch the bits of (y, x) interleave from the highest, so that
    each stage's window (dy, dx) is the fastest axis that is left.
    """
    batch = len(mask)
    split = mask.reshape(batch, grid[0], 2, 2, 2, 2, grid[1], 2, 2, 2, 2)
    order = (0, 1, 6, 2, 7, 3, 8, 4, 9, 5, 10)
    return np.ascontiguousarray(split.transpose(order).reshape(-1, 1))

"""The DINOv3 ViT that turns a crop into patch features.

Source: facebookresearch/dinov3 6876159a, `dinov3_vith16plus`, evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sam3d_gguf.runtime.body.neural import FloatArray
from sam3d_gguf.runtime.body.neural_parts import ENCODER, BodyDimensions
from sam3d_gguf.runtime.ggml.network import Network, Parts, Taps
from sam3d_gguf.runtime.ggml.store import Tensor
from sam3d_gguf.runtime.patches import patchify

_Detail = Callable[[str, Tensor], Tensor]

EPSILON = 1e-5
BLOCKS_PER_GRAPH = 4
"""On the CPU; on a GPU the blocks share one graph, so that the tokens stay in its memory."""


def backbone_features(
    parts: Parts,
    dimensions: BodyDimensions,
    periods: FloatArray,
    image: FloatArray,
    taps: Taps | None,
) -> FloatArray:
    """Normed patch features.

    Args:
        periods: [head_dim / 4], of the rotary embedding.
        image: [B, 3, H, W], normalised RGB.

    Returns:
        [B, H / patch, W / patch, C].

    Raises:
        InputError: the image is not of whole patches.
    """
    patches, grid = patchify(image, dimensions.patch)
    sine, cosine = rope_angles(periods, grid)
    run = _Run(parts, dimensions, grid, taps)
    tokens = run.embed(patches)
    if taps is not None:
        taps("backbone.rope_sin", sine)
        taps("backbone.rope_cos", cosine)
    prefix = 1 + dimensions.storage_tokens
    for first in range(0, dimensions.depth, run.blocks_per_graph):
        tokens = run.blocks(first, tokens, _signed_sine(sine, prefix), _prefixed(cosine, prefix))
    features = tokens[:, prefix:].reshape(len(image), *grid, dimensions.channels)
    if taps is not None:
        taps("backbone.features_nchw", channels_first(features))
    return features


def rope_angles(periods: FloatArray, grid: tuple[int, int]) -> tuple[FloatArray, FloatArray]:
    """Sine and cosine of the axial rotary embedding, [patches, head_dim] each."""
    centres = [
        np.float32(2) * ((np.arange(size, dtype=np.float32) + np.float32(0.5)) / np.float32(size))
        - np.float32(1)
        for size in grid
    ]
    rows, columns = np.meshgrid(*centres, indexing="ij")
    coordinates = np.stack([rows.ravel(), columns.ravel()], axis=1)
    angles = np.float32(2 * np.pi) * coordinates[:, :, None] / periods[None, None, :]
    tiled = np.tile(angles.reshape(len(coordinates), -1), 2)
    return np.sin(tiled), np.cos(tiled)


def channels_first(features: FloatArray) -> FloatArray:
    """[B, h, w, C] to a contiguous [B, C, h, w]."""
    return np.ascontiguousarray(features.transpose(0, 3, 1, 2))


def _prefixed(cosine: FloatArray, prefix: int) -> FloatArray:
    """[tokens, 1, head_dim], 1 for the tokens before the patches, which are not rotated."""
    ones = np.ones((prefix, cosine.shape[1]), np.float32)
    return np.concatenate([ones, cosine])[:, None]


def _signed_sine(sine: FloatArray, prefix: int) -> FloatArray:
    """[tokens, 1, head_dim], rotate-half's sign included, 0 for the tokens before the patches."""
    half = sine.shape[1] // 2
    signed = np.concatenate([-sine[:, :half], sine[:, half:]], axis=1)
    zeros = np.zeros((prefix, sine.shape[1]), np.float32)
    return np.concatenate([zeros, signed])[:, None]


class _Run:
    """One forward pass."""

    def __init__(
        self,
        parts: Parts,
        dimensions: BodyDimensions,
        grid: tuple[int, int],
        taps: Taps | None,
    ) -> None:
        self._parts = parts
        self._dimensions = dimensions
        self._grid = grid
        self._taps = taps
        cpu = parts.backend.device.backend == "cpu"
        self.blocks_per_graph = BLOCKS_PER_GRAPH if cpu else dimensions.depth

    def embed(self, patches: FloatArray) -> FloatArray:
        """Patches to the tokens cls, storage, patches: [B, tokens, C]."""
        batch, channels = len(patches), self._dimensions.channels
        storage = self._dimensions.storage_tokens

        def build(network: Network) -> None:
            kernel = network.weight(f"{ENCODER}.patch_embed.proj.weight")
            embedded = network.linear(
                network.tensors["patches"],
                network.reshape(kernel, (channels, patches.shape[2])),
                network.weight(f"{ENCODER}.patch_embed.proj.bias"),
            )
            network.tap("backbone.patch_embed_nhwc", embedded)
            leading = [
                network.repeat(
                    network.reshape(network.weight(f"{ENCODER}.cls_token"), (1, 1, channels)),
                    (batch, 1, channels),
                ),
                network.repeat(
                    network.weight(f"{ENCODER}.storage_tokens"), (batch, storage, channels)
                ),
            ]
            tokens = network.concat([*leading, embedded], axis=1)
            network.output("tokens", network.tap("backbone.tokens_in", tokens))

        results = self._parts.run("backbone.embed", {"patches": patches}, build, taps=self._taps)
        if self._taps is not None:
            embedded = results["backbone.patch_embed_nhwc"]
            self._taps("backbone.patch_embed_nhwc", embedded.reshape(batch, *self._grid, channels))
            self._taps("backbone.tokens_in", results["backbone.tokens_in"])
        return results["tokens"]

    def blocks(
        self, first: int, tokens: FloatArray, sine: FloatArray, cosine: FloatArray
    ) -> FloatArray:
        """The blocks from `first` that share a graph, and the final norm after the last one."""
        depth = self._dimensions.depth
        last = min(first + self.blocks_per_graph, depth)

        def build(network: Network) -> None:
            x = network.tensors["tokens"]
            for index in range(first, last):
                x = self._block(network, index, x)
            if last == depth:
                x = network.norm(x, f"{ENCODER}.norm", EPSILON)
            network.output("tokens", x)

        results = self._parts.run(
            f"backbone.blocks{first:02d}",
            {"tokens": tokens, "sine": sine, "cosine": cosine},
            build,
            taps=self._taps,
        )
        normed = results.pop("tokens")
        if self._taps is not None:
            for name, array in results.items():
                self._taps(name, array)
        return normed

    def _block(self, network: Network, index: int, x: Tensor) -> Tensor:
        module = f"{ENCODER}.blocks.{index}"
        stage = f"backbone.block{index:02d}"

        def detail(name: str, tensor: Tensor) -> Tensor:
            """The inside of the first block only, as the reference captures have it."""
            return network.tap(f"{stage}.{name}", tensor) if index == 0 else tensor

        with network.scope(stage):
            normed = detail("norm1", network.norm(x, f"{module}.norm1", EPSILON))
            qkv = detail("qkv", network.dense(normed, f"{module}.attn.qkv"))
            attended = self._attention(network, qkv, detail)
            projected = detail("attn_proj", network.dense(attended, f"{module}.attn.proj"))
            scaled = detail(
                "ls1", network.multiply(projected, network.weight(f"{module}.ls1.gamma"))
            )
            x = network.add(x, scaled)
            normed = detail("norm2", network.norm(x, f"{module}.norm2", EPSILON))
            gated = network.swiglu(
                network.matmul(normed, network.weight(f"{module}.mlp.w1.weight")),
                network.matmul(normed, network.weight(f"{module}.mlp.w2.weight")),
                network.weight(f"{module}.mlp.w1.bias"),
                network.weight(f"{module}.mlp.w2.bias"),
            )
            fed = detail("swiglu", network.dense(gated, f"{module}.mlp.w3"))
            scaled = detail("ls2", network.multiply(fed, network.weight(f"{module}.ls2.gamma")))
            return network.tap(f"{stage}.out", network.add(x, scaled))

    def _attention(self, network: Network, qkv: Tensor, detail: _Detail) -> Tensor:
        channels, heads = self._dimensions.channels, self._dimensions.heads
        both = network.split_heads(qkv, 0, 2 * channels, 2 * heads)
        rotated = network.rotate(both, network.tensors["cosine"], network.tensors["sine"])
        rotated = network.permute(rotated, (0, 2, 1, 3))
        q = detail("q_rope", network.narrow(rotated, 1, 0, heads))
        k = detail("k_rope", network.narrow(rotated, 1, heads, heads))
        v = network.split_heads(qkv, 2 * channels, channels, heads)
        return network.attention(q, k, network.permute(v, (0, 2, 1, 3)))

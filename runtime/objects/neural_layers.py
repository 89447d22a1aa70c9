"""Layers that the networks of SAM 3D Objects have in common."""

from __future__ import annotations

import numpy as np

from sam3d_gguf.runtime.ggml.graph import FloatArray, IndexArray
from sam3d_gguf.runtime.ggml.network import Network
from sam3d_gguf.runtime.ggml.store import Tensor


def attend(network: Network, q: Tensor, k: Tensor, v: Tensor, *, joined: bool = True) -> Tensor:
    """Attention of [B, N, heads, width] each; the result is [B, N, heads * width]."""
    q, k, v = (network.permute(each, (0, 2, 1, 3)) for each in (q, k, v))
    return network.attention(q, k, v, joined=joined)


def self_attention(network: Network, qkv: Tensor, heads: int) -> Tensor:
    """Attention of each batch to itself; [B, N, 3 * C] holds queries, keys and values."""
    width = qkv.shape[2] // 3
    q, k, v = (network.split_heads(qkv, part * width, width, heads) for part in range(3))
    return attend(network, q, k, v)


def embed_patches(network: Network, patches: Tensor, module: str) -> Tensor:
    """[1, patches, C] of [1, patches, values], by the kernel of a convolution over whole patches."""
    kernel = network.weight(f"{module}.patch_embed.proj.weight")
    flat = network.reshape(kernel, (kernel.shape[0], patches.shape[2]))
    return network.linear(patches, flat, network.weight(f"{module}.patch_embed.proj.bias"))


def vit_block(network: Network, x: Tensor, module: str, heads: int, epsilon: float) -> Tensor:
    """A pre-norm transformer block; with layer scale where the checkpoint has one."""

    def scaled(update: Tensor, name: str) -> Tensor:
        gamma = f"{module}.{name}.gamma"
        return network.multiply(update, network.weight(gamma)) if network.has(gamma) else update

    normed = network.norm(x, f"{module}.norm1", epsilon)
    attended = self_attention(network, network.dense(normed, f"{module}.attn.qkv"), heads)
    x = network.add(x, scaled(network.dense(attended, f"{module}.attn.proj"), "ls1"))
    normed = network.norm(x, f"{module}.norm2", epsilon)
    hidden = network.gelu(network.dense(normed, f"{module}.mlp.fc1"))
    return network.add(x, scaled(network.dense(hidden, f"{module}.mlp.fc2"), "ls2"))


def feed_forward(network: Network, x: Tensor, module: str) -> Tensor:
    """Two linear layers with a GELU (tanh) between."""
    product = network.matmul(x, network.weight(f"{module}.mlp.0.weight"))
    hidden = network.gelu_tanh(product, network.weight(f"{module}.mlp.0.bias"))
    return network.dense(hidden, f"{module}.mlp.2")


def position_embedding(coordinates: IndexArray, channels: int) -> FloatArray:
    """[N, 3] whole numbers to [N, channels]: sines and cosines of each axis, zeros after them."""
    count = channels // 6
    exponents = np.arange(count, dtype=np.float32) / np.float32(count)
    frequencies = (1 / np.power(10000.0, exponents.astype(np.float64))).astype(np.float32)
    angles = coordinates.astype(np.float32)[:, :, None] * frequencies
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=2)
    embedded = np.zeros((len(coordinates), channels), np.float32)
    embedded[:, : 6 * count] = waves.reshape(len(coordinates), -1)
    return embedded

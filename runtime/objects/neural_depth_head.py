"""The layers that turn the depth model's features into points: convolutions over rows of pixels.

Source: microsoft/MoGe (`Head` and `ResidualConvBlock` of version 1), evaluation mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sam3d_gguf.runtime.ggml.graph import FloatArray, IndexArray
from sam3d_gguf.runtime.ggml.network import Network
from sam3d_gguf.runtime.ggml.store import Tensor
from sam3d_gguf.runtime.objects.neural_sparse import gathered_products, group_norm
from sam3d_gguf.runtime.objects.resize import Size, linear_taps

LEVELS = 3
"""How often the resolution doubles."""

CORNERS = 4

_KERNEL = 3
_DOUBLED = 2
_GROUP = 32
"""Channels that are normed together inside a residual block."""

_OUTPUTS = ("head.output_block.0", "head.output_block.1")
"""The blocks that give the points and the mask."""


def neighbourhoods(numbers: IndexArray) -> IndexArray:
    """[H * W * 9] rows of the 3 x 3 pixels around each, the border's repeated beyond it.

    Args:
        numbers: [H, W] the row of each pixel.
    """
    padded = np.pad(numbers, _KERNEL // 2, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (_KERNEL, _KERNEL))
    return np.ascontiguousarray(windows).reshape(-1)


def row_numbers(size: Size) -> IndexArray:
    """[H, W] rows of pixels in row-major order."""
    return np.arange(size[0] * size[1], dtype=np.int32).reshape(size)


def doubled_numbers(size: Size) -> IndexArray:
    """[2 * H, 2 * W] the rows that `upsample` puts the pixels in: the four of each one together."""
    height, width = size
    together = np.arange(height * width * _DOUBLED**2, dtype=np.int32)
    split = together.reshape(height, width, _DOUBLED, _DOUBLED)
    return split.transpose(0, 2, 1, 3).reshape(_DOUBLED * height, _DOUBLED * width)


def bilinear_corners(size: Size, target: Size) -> tuple[IndexArray, FloatArray]:
    """The four pixels of `size` that each of `target` lies between, and their weights.

    Returns:
        [CORNERS, pixels] rows and [CORNERS, pixels, 1] weights.
    """
    rows, columns = (linear_taps(*sides) for sides in zip(size, target, strict=True))
    count = target[0] * target[1]
    numbers = rows.sources[:, None, :, None] * size[1] + columns.sources[:, None, :]
    weights = rows.weights[:, None, :, None] * columns.weights[:, None, :]
    rows_of = numbers.reshape(CORNERS, count).astype(np.int32)
    return rows_of, weights.reshape(CORNERS, count, 1)


def upsample(network: Network, x: Tensor, around: Tensor, module: str) -> Tensor:
    """A transposed convolution that doubles the resolution, and a convolution.

    Args:
        x: [pixels, in].
        around: `neighbourhoods` of `doubled_numbers`, as an index input.

    Returns:
        [4 * pixels, out], row-major.
    """
    kernel = network.weight(f"{module}.0.weight")
    channels, out = kernel.shape[:2]
    # One product for the four pixels that come of one.
    turned = network.reshape(network.permute(kernel, (2, 3, 1, 0)), (_DOUBLED**2 * out, channels))
    doubled = network.reshape(network.matmul(x, turned), (x.shape[0] * _DOUBLED**2, out))
    doubled = network.add(doubled, network.weight(f"{module}.0.bias"))
    return convolve(network, doubled, around, f"{module}.1")


def residual(network: Network, x: Tensor, around: Tensor, module: str, epsilon: float) -> Tensor:
    """Two convolutions of [pixels, C], each after a group norm, and x."""
    with network.scope(module):
        h = group_norm(network, x, f"{module}.layers.0", 1, epsilon)
        h = convolve(network, network.relu(h), around, f"{module}.layers.2")
        h = group_norm(network, h, f"{module}.layers.3", h.shape[1] // _GROUP, epsilon)
        h = convolve(network, network.relu(h), around, f"{module}.layers.5")
        return network.add(h, x)


def convolve(network: Network, x: Tensor, around: Tensor, module: str) -> Tensor:
    """A convolution of [pixels, in] with a kernel of 3 x 3.

    Args:
        around: `neighbourhoods`, as an index input.

    Returns:
        [pixels, out].
    """
    bias = network.weight(f"{module}.bias")
    return gathered_products(network, x, around, _flat(network, f"{module}.weight"), bias)


def interpolate(
    network: Network, x: Tensor, corners: Sequence[Tensor], weights: Sequence[Tensor]
) -> Tensor:
    """[pixels, C] at another resolution.

    Args:
        corners, weights: the rows of `bilinear_corners`, the former as index inputs.
    """
    parts = [
        network.multiply(network.gather(x, numbers), weight)
        for numbers, weight in zip(corners, weights, strict=True)
    ]
    return network.add(network.add(parts[0], parts[1]), network.add(parts[2], parts[3]))


def outputs(network: Network, x: Tensor, around: Tensor) -> tuple[Tensor, Tensor]:
    """[pixels, 3] points before their remapping and [pixels, 1] the mask, of [pixels, in]."""
    kernels = [_flat(network, f"{module}.0.weight") for module in _OUTPUTS]
    biases = [network.weight(f"{module}.0.bias") for module in _OUTPUTS]
    # Both blocks' convolutions in one, so that the pixels are gathered once.
    kernel, bias = network.concat(kernels, axis=0), network.concat(biases, axis=0)
    h = network.relu(gathered_products(network, x, around, kernel, bias))
    width = biases[0].shape[0]
    points, mask = (
        pointwise(network, network.narrow(h, 1, index * width, width), f"{module}.2")
        for index, module in enumerate(_OUTPUTS)
    )
    return points, mask


def pointwise(network: Network, x: Tensor, module: str) -> Tensor:
    """A convolution of [..., pixels, in] with a kernel of 1 x 1."""
    kernel = network.weight(f"{module}.weight")
    flat = network.reshape(kernel, kernel.shape[:2])
    return network.linear(x, flat, network.weight(f"{module}.bias"))


def _flat(network: Network, name: str) -> Tensor:
    """[out, in, 3, 3] as [out, 9 * in], the order of gathered pixels."""
    kernel = network.weight(name)
    out, channels = kernel.shape[:2]
    return network.reshape(network.permute(kernel, (0, 2, 3, 1)), (out, _KERNEL**2 * channels))

"""Convolution and windowed attention over rows of voxels, by tables of row numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sam3d_gguf.runtime.ggml.graph import GATHER_STEP, FloatArray, IndexArray
from sam3d_gguf.runtime.ggml.network import Network
from sam3d_gguf.runtime.ggml.store import Tensor
from sam3d_gguf.runtime.objects.neural_layers import self_attention


class Downsampling(Protocol):
    """N voxels taken together in cubes, and back."""

    @property
    def coords(self) -> IndexArray:
        """[M, 4] of the cubes: batch, x, y, z."""
        ...

    @property
    def parents(self) -> IndexArray:
        """[N] the cube of every voxel."""
        ...

    @property
    def children(self) -> IndexArray:
        """[M, 8] the voxels of every cube, then N."""
        ...

    @property
    def weights(self) -> FloatArray:
        """[M] factors of the cubes' sums."""
        ...


class Windows(Protocol):
    """Voxels that attend to each other."""

    @property
    def order(self) -> IndexArray:
        """[N] rows, window after window."""
        ...

    @property
    def lengths(self) -> IndexArray:
        """[W] voxels of each window, in that order."""
        ...


_GATHERED = 1 << 24
"""Values that are gathered at a time."""

_MAX_PIECES = 256


def convolve(network: Network, x: Tensor, neighbours: Tensor, module: str) -> Tensor:
    """A convolution of [rows, in] as products of gathered rows.

    Args:
        neighbours: an index input of [outputs * taps] rows; the number `rows` is a row of zeros.

    Returns:
        [outputs, out].
    """
    kernel = network.weight(f"{module}.weight")
    out, taps, channels = kernel.shape
    flat = network.reshape(kernel, (out, taps * channels))
    bias = network.weight(f"{module}.bias")
    joined = network.convolve(x, neighbours, flat, bias)
    if joined is not None:
        return joined
    return gathered_products(network, with_zeros(network, x), neighbours, flat, bias)


def gathered_products(
    network: Network, x: Tensor, numbers: Tensor, kernel: Tensor, bias: Tensor
) -> Tensor:
    """Products of rows that stand together, gathered piece by piece so that memory is bounded.

    Args:
        x: [rows, channels].
        numbers: an index input of [outputs * taps] rows.
        kernel: [out, taps * channels].

    Returns:
        [outputs, out].
    """
    columns = kernel.shape[1]
    taps = columns // x.shape[1]
    outputs = numbers.shape[0] // taps
    size = max(_GATHERED // columns, -(-outputs // _MAX_PIECES), 1)
    size = -(-size // GATHER_STEP) * GATHER_STEP
    pieces: list[Tensor] = []
    for start in range(0, outputs, size):
        count = min(size, outputs - start)
        part = network.narrow(numbers, 0, start * taps, count * taps)
        rows = network.reshape(network.gather(x, part), (count, columns))
        pieces.append(network.linear(rows, kernel, bias))
    return network.concat(pieces, axis=0)


def convolve_grid(network: Network, x: Tensor, side: int, module: str) -> Tensor:
    """A 3x3x3 convolution of all places of a grid, [side^3, in], as products of neighbourhoods."""
    kernel = network.weight(f"{module}.weight")
    out, taps, channels = kernel.shape
    flat = network.reshape(network.permute(kernel, (0, 2, 1)), (out, channels * taps))
    bias = network.weight(f"{module}.bias")
    turned = network.contiguous(network.permute(x, (1, 0)))
    grid = network.pad_planes(network.reshape(turned, (channels, side, side, side)))
    size = max(1, _GATHERED // (taps * channels * side**2))
    pieces: list[Tensor] = []
    for start in range(0, side, size):
        count = min(size, side - start)
        around = network.neighbourhoods(network.narrow(grid, 1, start, count + 2))
        pieces.append(network.linear(around, flat, bias))
    return network.concat(pieces, axis=0)


def with_zeros(network: Network, x: Tensor) -> Tensor:
    """[rows, C] and a row of zeros after them."""
    first = network.reshape(network.narrow(x, 0, 0, 1), (1, x.shape[1]))
    return network.concat([x, network.scale(first, 0.0)], axis=0)


def pool(network: Network, x: Tensor, children: Tensor, weights: Tensor) -> Tensor:
    """The weighted sums of the children of each cube.

    Args:
        children: an index input of [cubes * parts] rows; the number `rows` is a row of zeros.
        weights: [cubes, 1].
    """
    cubes, channels = weights.shape[0], x.shape[1]
    parts = children.shape[0] // cubes
    gathered = network.gather(with_zeros(network, x), children)
    beside = network.reshape(gathered, (cubes, parts * channels))
    total = network.narrow(beside, 1, 0, channels)
    for part in range(1, parts):
        total = network.add(total, network.narrow(beside, 1, part * channels, channels))
    return network.multiply(total, weights)


@dataclass(frozen=True, slots=True, eq=False)
class WindowRuns:
    """Windows by length, so that those of one length are attended to together.

    Attributes:
        order: [N] rows, window after window.
        places: [N] where each row stands in that order.
        runs: how many windows of which length follow each other.
    """

    order: IndexArray
    places: IndexArray
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, windows: Windows) -> WindowRuns:
        """Sorts windows by length."""
        lengths = windows.lengths
        starts = np.cumsum(lengths) - lengths
        by_length = np.argsort(lengths, kind="stable")
        rows = [windows.order[starts[w] : starts[w] + lengths[w]] for w in by_length]
        order = np.concatenate(rows).astype(np.int32)
        places = np.empty_like(order)
        places[order] = np.arange(len(order), dtype=np.int32)
        values, counts = np.unique(lengths, return_counts=True)
        return cls(order, places, tuple(zip(counts.tolist(), values.tolist(), strict=True)))


def windowed_attention(
    network: Network,
    qkv: Tensor,
    order: Tensor,
    places: Tensor,
    runs: tuple[tuple[int, int], ...],
    heads: int,
) -> Tensor:
    """Attention of each window's voxels to each other.

    Args:
        qkv: [N, 3 * C].
        order, places, runs: as in `WindowRuns`, the first two as index inputs.

    Returns:
        [N, C].
    """
    gathered = network.gather(qkv, order)
    width = qkv.shape[1]
    start = 0
    attended: list[Tensor] = []
    for count, length in runs:
        rows = network.narrow(gathered, 0, start, count * length)
        batch = network.reshape(rows, (count, length, width))
        found = self_attention(network, batch, heads)
        attended.append(network.reshape(found, (count * length, width // 3)))
        start += count * length
    return network.gather(network.concat(attended, axis=0), places)


def group_norm(network: Network, x: Tensor, module: str, groups: int, epsilon: float) -> Tensor:
    """An nn.GroupNorm of [N, C], whose statistics are those of all rows."""
    rows, channels = x.shape
    split = network.reshape(x, (rows, groups, channels // groups))
    turned = network.contiguous(network.permute(split, (1, 0, 2)))
    normed = network.normalize(
        network.reshape(turned, (groups, x.shape[0] * channels // groups)), epsilon
    )
    back = network.reshape(normed, (groups, rows, channels // groups))
    normed = network.reshape(network.permute(back, (1, 0, 2)), (rows, channels))
    scaled = network.multiply(normed, network.weight(f"{module}.weight"))
    return network.add(scaled, network.weight(f"{module}.bias"))

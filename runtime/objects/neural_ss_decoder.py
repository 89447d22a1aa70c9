"""The decoder of the sparse structure: a latent grid to the logits of occupancy.

Source: facebookresearch/sam-3d-objects (`SparseStructureDecoder`), evaluation mode.
"""

from __future__ import annotations

import numpy as np

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.graph import FloatArray, IndexArray, InputArray
from sam3d_gguf.runtime.ggml.network import DeviceModel, Network, Parts, Taps
from sam3d_gguf.runtime.ggml.store import Tensor, WeightStore
from sam3d_gguf.runtime.objects.neural_settings import Settings
from sam3d_gguf.runtime.objects.neural_sparse import convolve, convolve_grid
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import InputError

_STAGES = ((0, 1), (3, 4), (6, 7))
"""The residual blocks at each resolution; between them one that doubles it."""


class SparseStructureDecoder(DeviceModel):
    """The occupancy decoder on one device. Not safe for concurrent calls, except `cancel`."""

    def __init__(self, backend: Backend, weights: Weights) -> None:
        """Places the weights on the device.

        Args:
            weights: of `ss_decoder`.

        Raises:
            ContractError: a tensor or a key is missing.
            BackendError: the device has too little memory.
        """
        settings = Settings(weights)
        self._resolution = settings.integer("latent_resolution")
        self._channels = settings.integer("latent_channels")
        self._epsilon = settings.real("layer_norm_epsilon")
        super().__init__(Parts(WeightStore(backend, weights, weights.tensors), backend))

    def logits(self, latent: FloatArray, *, taps: Taps | None = None) -> FloatArray:
        """[R, R, R] logits of occupancy, at four times the latent's resolution.

        Args:
            latent: [1, r * r * r, channels], x slowest, z fastest.

        Raises:
            InputError: the latent has another shape.
            CancelledError: `cancel` was called.
        """
        side = self._resolution
        wanted = (1, side**3, self._channels)
        if latent.shape != wanted:
            raise InputError(f"the latent has the shape {latent.shape}", expected=str(wanted))
        x: FloatArray = latent[0]
        for stage, blocks in enumerate(_STAGES):
            x = self._stage(stage, blocks, x, side, taps)
            side *= 2
        logits: FloatArray = x.reshape((side // 2,) * 3)
        return logits

    def _stage(
        self, stage: int, blocks: tuple[int, int], x: FloatArray, side: int, taps: Taps | None
    ) -> FloatArray:
        """The layers at one resolution; rows that already are at the next, or logits."""
        last = stage == len(_STAGES) - 1

        inputs: dict[str, InputArray] = {"x": x}
        if self._parts.backend.has_kernels:
            inputs["neighbours"] = grid_neighbours(side)

        def convolved(network: Network, h: Tensor, module: str) -> Tensor:
            if "neighbours" in network.tensors:
                return convolve(network, h, network.tensors["neighbours"], module)
            return convolve_grid(network, h, side, module)

        def residual(network: Network, x: Tensor, module: str) -> Tensor:
            h = x
            with network.scope(module):
                for number in ("1", "2"):
                    h = network.silu(network.norm(h, f"{module}.norm{number}", self._epsilon))
                    h = convolved(network, h, f"{module}.conv{number}")
                return network.add(h, x)

        def build(network: Network) -> None:
            h = network.tensors["x"]
            if stage == 0:
                h = network.tap("input_layer", convolved(network, h, "input_layer"))
                for index in (0, 1):
                    h = residual(network, h, f"middle_block.{index}")
                network.tap("middle_block", h)
            for index in blocks:
                h = residual(network, h, f"blocks.{index}")
                network.tap(f"block{index}", h)
            if last:
                h = network.silu(network.norm(h, "out_layer.0", self._epsilon))
                h = convolved(network, h, "out_layer.2")
            else:
                h = convolved(network, h, f"blocks.{blocks[1] + 1}.conv")
            network.output("y", h)

        rows = {"neighbours": side**3 + 1} if "neighbours" in inputs else None
        results = self._parts.run(f"decoder{stage}", inputs, build, rows=rows, taps=taps)
        y = results.pop("y")
        y = y if last else pixel_shuffle(y, side)
        if taps is not None:
            for name, array in results.items():
                taps(name, _channels_first(array, side))
            name = "logits" if last else f"block{blocks[1] + 1}"
            taps(name, _channels_first(y, side if last else 2 * side))
        return y


def grid_neighbours(side: int) -> IndexArray:
    """[side^3 * 27] rows of a full grid's 3x3x3 neighbourhoods; side^3 where there is none."""
    numbers = np.full((side + 2,) * 3, side**3, np.int32)
    inner = slice(1, side + 1)
    numbers[inner, inner, inner] = np.arange(side**3, dtype=np.int32).reshape((side,) * 3)
    windows = np.lib.stride_tricks.sliding_window_view(numbers, (3, 3, 3))
    return np.ascontiguousarray(windows).reshape(-1)


def pixel_shuffle(rows: FloatArray, side: int) -> FloatArray:
    """[side^3, C * 8] to [(2 * side)^3, C]: channel ((c*2+dx)*2+dy)*2+dz goes to (dx, dy, dz)."""
    split = rows.reshape(side, side, side, -1, 2, 2, 2)
    moved = split.transpose(0, 4, 1, 5, 2, 6, 3)
    return np.ascontiguousarray(moved).reshape((2 * side) ** 3, -1)


def _channels_first(rows: FloatArray, side: int) -> FloatArray:
    return np.ascontiguousarray(rows.T).reshape(1, -1, side, side, side)

"""The decoders of the structured latents: raw Gaussians, and the features of the mesh's cubes.

Source: facebookresearch/sam-3d-objects (`SLatGaussianDecoder`, `SLatMeshDecoder`), evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.graph import MAX_TENSORS, FloatArray, IndexArray, InputArray
from sam3d_gguf.runtime.ggml.network import DeviceModel, Network, Parts, Taps
from sam3d_gguf.runtime.ggml.store import Tensor, WeightStore
from sam3d_gguf.runtime.objects.neural_layers import feed_forward, position_embedding
from sam3d_gguf.runtime.objects.neural_settings import Settings
from sam3d_gguf.runtime.objects.neural_sparse import (
    WindowRuns,
    Windows,
    convolve,
    group_norm,
    windowed_attention,
)
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import InputError

_PERTURBATION = "offset_perturbation"
_SKIP = "skip_connection.conv"
_PARTS = 8
_NODES_OF_A_RUN = 24
"""At most, of the windows of one length."""


class _LatentDecoder(DeviceModel):
    """A transformer over voxels that attend to those of their window.

    Attributes:
        window_size: side of a window in voxels.
    """

    def __init__(self, backend: Backend, weights: Weights) -> None:
        """Places the weights on the device.

        Raises:
            ContractError: a tensor or a key is missing.
            BackendError: the device has too little memory.
        """
        self._settings = settings = Settings(weights)
        self._channels = settings.integer("channels")
        self._latent_channels = settings.integer("latent_channels")
        self._heads = settings.integer("attention.head_count")
        self.window_size = settings.integer("attention.window_size")
        derived = {
            name: _pointwise(weights.array(name))
            for name in weights.tensors
            if name.endswith(f"{_SKIP}.weight")
        }
        names = [name for name in weights.tensors if name not in (_PERTURBATION, *derived)]
        super().__init__(Parts(WeightStore(backend, weights, names, derived), backend))

    def _transform(
        self,
        feats: FloatArray,
        coords: IndexArray,
        windows: tuple[Windows, Windows],
        taps: Taps | None,
    ) -> FloatArray:
        """[N, latent channels] to [N, channels]."""
        wanted = (len(coords), self._latent_channels)
        if feats.shape != wanted or coords.shape != (len(coords), 4) or not len(coords):
            raise InputError(
                f"the latents have the shape {feats.shape}, the voxels {coords.shape}",
                expected=f"[N, {self._latent_channels}], [N, 4]",
            )

        def build(network: Network) -> None:
            x = network.tap("input_layer", network.dense(network.tensors["feats"], "input_layer"))
            network.output("x", network.add(x, network.tensors["positions"]))

        positions = position_embedding(coords[:, 1:], self._channels)
        x = self._run("input_layer", {"feats": feats, "positions": positions}, build, taps)
        runs = [WindowRuns.of(each) for each in windows]
        for index in range(self._settings.integer("block_count")):
            x = self._block(index, x, runs[index % 2], taps)
        return x

    def _block(
        self, index: int, x: FloatArray, windows: WindowRuns, taps: Taps | None
    ) -> FloatArray:
        stage, settings = f"blocks.{index}", self._settings

        def build(network: Network) -> None:
            given = network.tensors
            normed = network.normalize(given["x"], settings.real("norm1_epsilon"))
            qkv = network.dense(normed, f"{stage}.attn.to_qkv")
            attended = windowed_attention(
                network, qkv, given["order"], given["places"], windows.runs, self._heads
            )
            update = network.tap(f"{stage}.attn", network.dense(attended, f"{stage}.attn.to_out"))
            h = network.add(given["x"], update)
            normed = network.normalize(h, settings.real("norm2_epsilon"))
            h = network.add(h, feed_forward(network, normed, f"{stage}.mlp"))
            network.output("x", network.tap(stage, h))

        inputs: dict[str, InputArray] = {"x": x, "order": windows.order, "places": windows.places}
        rows = {"order": len(x), "places": len(x)}
        return self._run(stage, inputs, build, taps, rows, windows.runs)

    def _run(
        self,
        name: str,
        inputs: dict[str, InputArray],
        build: Callable[[Network], None],
        taps: Taps | None,
        rows: dict[str, int] | None = None,
        runs: tuple[tuple[int, int], ...] = (),
    ) -> FloatArray:
        capacity = MAX_TENSORS + _NODES_OF_A_RUN * len(runs)
        results = self._parts.run(
            name, inputs, build, rows=rows, taps=taps, variant=runs, capacity=capacity
        )
        x = results.pop("x")
        if taps is not None:
            for stage, array in results.items():
                taps(stage, array)
        return x


class GaussianDecoder(_LatentDecoder):
    """`slat_decoder_gs` or `slat_decoder_gs_4` on one device.

    Not safe for concurrent calls, except `cancel`.
    """

    def raw(
        self,
        feats: FloatArray,
        coords: IndexArray,
        windows: tuple[Windows, Windows],
        *,
        taps: Taps | None = None,
    ) -> FloatArray:
        """[N, 14 * Gaussians of a voxel], as the metadata's `gaussian.layout` says.

        Args:
            feats: [N, latent channels], denormalised.
            coords: [N, 4], batch, x, y, z.
            windows: of side `window_size`: those of even blocks, without a shift, and those of
                odd ones, shifted by half a side.

        Raises:
            InputError: the latents or the voxels have another shape.
            CancelledError: `cancel` was called.
        """
        x = self._transform(feats, coords, windows, taps)

        def build(network: Network) -> None:
            epsilon = self._settings.real("output_norm_epsilon")
            normed = network.normalize(network.tensors["x"], epsilon)
            network.output("x", network.tap("out_layer_raw", network.dense(normed, "out_layer")))

        return self._run("out_layer", {"x": x}, build, taps)


@dataclass(frozen=True, slots=True, eq=False)
class MeshTables:
    """Where the voxels of a mesh decoder lie.

    Attributes:
        windows: as the Gaussian decoders take them.
        neighbours: [8 N, 27] and [64 N, 27] rows around every part of the voxels that were
            subdivided once and twice; the number of all rows for none. Row i is a part of the
            row i // 8 before.
    """

    windows: tuple[Windows, Windows]
    neighbours: tuple[IndexArray, IndexArray]


class MeshDecoder(_LatentDecoder):
    """`slat_decoder_mesh` on one device, without the extraction of the mesh.

    Not safe for concurrent calls, except `cancel`.
    """

    def features(
        self,
        feats: FloatArray,
        coords: IndexArray,
        tables: MeshTables,
        *,
        taps: Taps | None = None,
    ) -> FloatArray:
        """[64 N, features of a cube], in the order of two subdivisions, without the sdf's bias.

        Args:
            feats: [N, latent channels], denormalised.
            coords: [N, 4], batch, x, y, z.

        Raises:
            InputError: the latents, the voxels or the tables have another shape.
            CancelledError: `cancel` was called.
        """
        shapes = [table.shape for table in tables.neighbours]
        wanted = [(_PARTS * len(coords), 27), (_PARTS**2 * len(coords), 27)]
        if shapes != wanted:
            raise InputError(f"the tables have the shapes {shapes}", expected=str(wanted))
        x = self._transform(feats, coords, tables.windows, taps)
        for index, neighbours in enumerate(tables.neighbours):
            x = self._upsample(index, x, neighbours, taps)

        def build(network: Network) -> None:
            x = network.dense(network.tensors["x"], "out_layer")
            network.output("x", network.tap("out_layer", x))

        return self._run("out_layer", {"x": x}, build, taps)

    def _upsample(
        self, index: int, x: FloatArray, neighbours: IndexArray, taps: Taps | None
    ) -> FloatArray:
        """A subdivision; what is alike in all parts of a voxel is computed for the voxel."""
        module, rows = f"upsample.{index}", len(x)

        def norm(network: Network, h: Tensor, name: str) -> Tensor:
            groups = self._settings.integer("group_count")
            epsilon = self._settings.real("upsample.group_norm_epsilon")
            return network.silu(group_norm(network, h, f"{module}.{name}", groups, epsilon))

        def build(network: Network) -> None:
            given = network.tensors
            h = norm(network, given["x"], "act_layers.0")
            network.tap(f"{module}.act_layers", h)
            h = convolve(network, h, given["around"], f"{module}.out_layers.0.conv")
            network.tap(f"{module}.out_layers.0", h)
            h = norm(network, h, "out_layers.1")
            h = convolve(network, h, given["neighbours"], f"{module}.out_layers.3.conv")
            skip = network.dense(given["x"], f"{module}.{_SKIP}")
            skip = network.gather(skip, given["voxels"])
            network.tap(f"{module}.skip_connection", skip)
            network.output("x", network.tap(module, network.add(h, skip)))

        inputs: dict[str, InputArray] = {
            "x": x,
            "around": neighbours.reshape(-1) // np.int32(_PARTS),
            "neighbours": neighbours.reshape(-1),
            "voxels": np.arange(_PARTS * rows, dtype=np.int32) // np.int32(_PARTS),
        }
        limits = {"around": rows + 1, "neighbours": _PARTS * rows + 1, "voxels": rows}
        return self._run(module, inputs, build, taps, limits)


def _pointwise(kernel: FloatArray) -> FloatArray:
    """The matrix [out, in] that the original multiplies by for a kernel [out, 1, in].

    spconv takes the kernel's values, as they lie in memory, for those of a matrix [in, out].
    """
    out, _, channels = kernel.shape
    return np.ascontiguousarray(kernel.reshape(channels, out).T)

"""The flow transformer of the structured latents: sparse residual blocks around full attention.

Source: facebookresearch/sam-3d-objects (`SLatFlowModelTdfyWrapper`), evaluation mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.graph import FloatArray, IndexArray, InputArray
from sam3d_gguf.runtime.ggml.network import DeviceModel, Network, Parts, Taps
from sam3d_gguf.runtime.ggml.store import Tensor
from sam3d_gguf.runtime.objects.neural_flow import (
    FLOW_CAPACITY,
    Conditions,
    FlowNetwork,
    FlowSettings,
    flow_store,
)
from sam3d_gguf.runtime.objects.neural_layers import attend, feed_forward, position_embedding
from sam3d_gguf.runtime.objects.neural_settings import Settings
from sam3d_gguf.runtime.objects.neural_sparse import Downsampling, convolve, pool
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import InputError

FEATURES = "feats"


@dataclass(frozen=True, slots=True, eq=False)
class FlowTables:
    """Where the voxels of a structured latent lie.

    Attributes:
        neighbours: [N, 27] rows around every voxel, in the order of a kernel's taps; N for none.
        cubes: the voxels taken together in cubes of side 2.
        cube_neighbours: [M, 27] the same of the cubes; M for none.
    """

    neighbours: IndexArray
    cubes: Downsampling
    cube_neighbours: IndexArray


class StructuredLatentFlow(DeviceModel):
    """The velocity of the voxels' latents on one device.

        with StructuredLatentFlow(backend, weights) as flow:
            flow.prepare(tokens, tables)
            velocity = flow.velocity({"feats": noise}, 312.5)

    Not safe for concurrent calls, except `cancel`.
    """

    def __init__(self, backend: Backend, weights: Weights) -> None:
        """Places the weights on the device.

        Args:
            weights: of `slat_generator`; only those of its flow transformer are loaded.

        Raises:
            ContractError: a tensor or a key is missing.
            BackendError: the device has too little memory.
        """
        settings = Settings(weights)
        self._settings = FlowSettings.of(weights)
        self._norm1_epsilon = settings.real("flow.resnet_norm1_epsilon")
        self._norm2_epsilon = settings.real("flow.resnet_norm2_epsilon")
        super().__init__(Parts(flow_store(backend, weights), backend))
        modules = tuple(f"flow.blocks.{index}.cross_attn" for index in range(self._settings.blocks))
        self._conditions = Conditions(self._parts, modules, self._settings)
        self._tables: dict[str, InputArray] = {}
        self._rows: dict[str, int] = {}

    def prepare(self, tokens: FloatArray, tables: FlowTables) -> None:
        """Computes and keeps what the velocities take from [1, L, condition channels].

        Raises:
            InputError: the tokens have another shape.
            BackendError: the device has too little memory.
        """
        self._conditions.prepare(tokens)
        cubes = tables.cubes
        voxels, count = len(tables.neighbours), len(cubes.coords)
        self._tables = {
            "neighbours": tables.neighbours.reshape(-1),
            "cube_neighbours": tables.cube_neighbours.reshape(-1),
            "children": cubes.children.reshape(-1),
            "parents": cubes.parents,
            "weights": cubes.weights[:, None],
            "positions": position_embedding(cubes.coords[:, 1:], self._settings.channels),
        }
        self._rows = {
            "neighbours": voxels + 1,
            "cube_neighbours": count + 1,
            "children": voxels + 1,
            "parents": count,
        }

    def velocity(
        self,
        latent: Mapping[str, FloatArray],
        time: float,
        step: float = 0.0,
        *,
        conditional: bool = True,
        taps: Taps | None = None,
    ) -> dict[str, FloatArray]:
        """The velocity of `feats`, [N, channels] or [1, N, channels], in the same shape.

        Args:
            time: times the scale of times (1000).
            step: 0; the network is not told how large a step is.
            conditional: False for condition tokens of zeros.

        Raises:
            InputError: the latent has another shape, the step is not 0, or there are no tokens.
            CancelledError: `cancel` was called.
        """
        variant = self._conditions.key(conditional)
        wanted = (len(self._tables["parents"]), self._settings.latent_channels)
        shape = latent[FEATURES].shape if set(latent) == {FEATURES} else ()
        if shape not in (wanted, (1, *wanted)) or step:
            raise InputError(
                f"the latent is { ({name: a.shape for name, a in latent.items()}) }, the step {step}",
                expected=f"{FEATURES} of the shape {wanted}, 0",
            )
        inputs: dict[str, InputArray] = {
            **self._tables,
            "x": latent[FEATURES].reshape(wanted),
            "time": self._settings.time(time),
        }

        def build(network: Network) -> None:
            flow = FlowNetwork(network, self._settings, self._conditions, conditional)
            self._build(network, flow)

        results = self._parts.run(
            "flow",
            inputs,
            build,
            rows=self._rows,
            taps=taps,
            variant=variant,
            capacity=FLOW_CAPACITY,
        )
        velocity = results.pop("velocity")
        if taps is not None:
            for name, array in results.items():
                taps(name, array)
        return {FEATURES: velocity.reshape(shape)}

    def _build(self, network: Network, flow: FlowNetwork) -> None:
        given, settings = network.tensors, self._settings
        time = network.tap("t_embedder", flow.time(given["time"], "flow.t_embedder"))
        x = network.tap("input_layer", network.dense(given["x"], "flow.input_layer"))
        fine = self._residual(network, flow, "input_blocks.0", x, given["neighbours"], time)
        x = pool(network, fine, given["children"], given["weights"])
        network.tap("input_blocks.last.downsample.feats", x)
        coarse = self._residual(network, flow, "input_blocks.1", x, given["cube_neighbours"], time)
        x = network.add(coarse, given["positions"])
        x = network.reshape(x, (1, *x.shape))
        for index in range(settings.blocks):
            with network.scope(f"block{index}"):
                x = self._block(network, flow, index, x, time)
        x = network.concat([network.reshape(x, x.shape[1:]), coarse], axis=1)
        x = network.gather(x, given["parents"])
        x = self._residual(network, flow, "out_blocks.0", x, given["neighbours"], time)
        x = network.concat([x, fine], axis=1)
        x = self._residual(network, flow, "out_blocks.1", x, given["neighbours"], time)
        x = network.normalize(x, settings.output_epsilon)
        network.output("velocity", network.dense(x, "flow.out_layer"))

    def _residual(
        self,
        network: Network,
        flow: FlowNetwork,
        stage: str,
        x: Tensor,
        neighbours: Tensor,
        time: Tensor,
    ) -> Tensor:
        """A sparse residual block, but for what doubles or halves the grid before it."""
        module = f"flow.{stage}"
        with network.scope(stage):
            scale, shift = flow.pieces(time, f"{module}.emb_layers.1", 2)
            h = network.silu(network.norm(x, f"{module}.norm1", self._norm1_epsilon))
            h = convolve(network, h, neighbours, f"{module}.conv1.conv")
            network.tap(f"{stage}.conv1", h)
            h = network.layer_norm(h, network.increment(scale), shift, self._norm2_epsilon)
            h = convolve(network, network.silu(h), neighbours, f"{module}.conv2.conv")
            skip = f"{module}.skip_connection"
            if network.has(f"{skip}.weight"):
                x = network.dense(x, skip)
            return network.tap(stage, network.add(h, x))

    def _block(
        self, network: Network, flow: FlowNetwork, index: int, x: Tensor, time: Tensor
    ) -> Tensor:
        stage, settings = f"blocks.{index}", self._settings
        module = f"flow.{stage}"
        modulation = flow.modulation(time, module, f"{stage}.adaLN_modulation")
        normed = network.layer_norm(
            x, modulation.scale_msa, modulation.shift_msa, settings.norm1_epsilon
        )
        q, k, v = flow.queries_keys_values(normed, f"{module}.self_attn")
        update = network.dense(attend(network, q, k, v), f"{module}.self_attn.to_out")
        network.tap(f"{stage}.self_attn", update)
        x = network.add(x, network.multiply(update, modulation.gate_msa))
        normed = network.norm(x, f"{module}.norm2", settings.norm2_epsilon)
        update = flow.cross_attention(normed, f"{module}.cross_attn")
        x = network.add(x, network.tap(f"{stage}.cross_attn", update))
        normed = network.layer_norm(
            x, modulation.scale_mlp, modulation.shift_mlp, settings.norm3_epsilon
        )
        update = feed_forward(network, normed, f"{module}.mlp")
        return network.tap(stage, network.add(x, network.multiply(update, modulation.gate_mlp)))

    def memory(self) -> dict[str, int]:
        """Bytes of weights, of intermediates, and of kept keys and values."""
        return {**super().memory(), "condition": self._conditions.size}

    def close(self) -> None:
        """Frees graphs, kept tensors and weights; the backend stays open."""
        self._parts.graphs.close()
        self._conditions.close()
        super().close()

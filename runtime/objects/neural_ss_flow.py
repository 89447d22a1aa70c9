"""The flow transformer of the sparse structure: shape and pose tokens side by side.

Source: facebookresearch/sam-3d-objects (`SparseStructureFlowTdfyWrapper`), evaluation mode.
"""

from __future__ import annotations

from collections.abc import Mapping

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.graph import FloatArray
from sam3d_gguf.runtime.ggml.network import DeviceModel, Network, Parts, Taps
from sam3d_gguf.runtime.ggml.store import Tensor
from sam3d_gguf.runtime.objects.neural_flow import (
    FLOW_CAPACITY,
    Conditions,
    FlowNetwork,
    FlowSettings,
    Modulation,
    flow_store,
)
from sam3d_gguf.runtime.objects.neural_layers import attend, feed_forward
from sam3d_gguf.runtime.objects.neural_settings import Settings
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import InputError

SHAPE = "shape"
POSE = "6drotation_normalized"
"""The stream of all pose tokens goes by the name of the first."""
_STREAMS = (POSE, SHAPE)
_VELOCITY = "velocity."


def latent_shapes(weights: Weights) -> dict[str, tuple[int, int, int]]:
    """[1, tokens, channels] of each latent of `ss_generator`, by modality.

    Raises:
        ContractError: a tensor or a key is missing.
    """
    return {
        name: (
            1,
            weights.tensor(f"flow.latent_mapping.{name}.pos_emb").shape[0],
            weights.tensor(f"flow.latent_mapping.{name}.input_layer.weight").shape[1],
        )
        for name in Settings(weights).texts("flow.noise_order")
    }


class SparseStructureFlow(DeviceModel):
    """The velocity of the shape and pose latents on one device.

        with SparseStructureFlow(backend, weights) as flow:
            flow.prepare(tokens)
            velocity = flow.velocity(latents, 437.5)

    Not safe for concurrent calls, except `cancel`.

    Attributes:
        shapes: of each latent, [1, tokens, channels], by modality.
    """

    def __init__(self, backend: Backend, weights: Weights) -> None:
        """Places the weights on the device.

        Args:
            weights: of `ss_generator`; only those of its flow transformer are loaded.

        Raises:
            ContractError: a tensor or a key is missing.
            BackendError: the device has too little memory.
        """
        settings = Settings(weights)
        self._settings = FlowSettings.of(weights)
        self._pose = settings.texts("flow.pose_order")
        self.shapes = latent_shapes(weights)
        super().__init__(Parts(flow_store(backend, weights), backend))
        modules = tuple(
            _cross_attention(index, stream)
            for index in range(self._settings.blocks)
            for stream in _STREAMS
        )
        self._conditions = Conditions(self._parts, modules, self._settings)

    def prepare(self, tokens: FloatArray) -> None:
        """Computes and keeps what the velocities take from [1, L, condition channels].

        Raises:
            InputError: the tokens have another shape.
            BackendError: the device has too little memory.
        """
        self._conditions.prepare(tokens)

    def velocity(
        self,
        latents: Mapping[str, FloatArray],
        time: float,
        step: float = 0.0,
        *,
        conditional: bool = True,
        taps: Taps | None = None,
    ) -> dict[str, FloatArray]:
        """The velocity of each latent.

        Args:
            latents: of the shapes in `shapes`.
            time: times the scale of times (1000).
            step: the size of a step of the distilled sampler, times the same scale; else 0.
            conditional: False for condition tokens of zeros.

        Raises:
            InputError: a latent is missing, unknown or of another shape, or there are no tokens.
            CancelledError: `cancel` was called.
        """
        found = {name: array.shape for name, array in latents.items()}
        if found != self.shapes:
            raise InputError(f"the latents are {found}", expected=str(self.shapes))
        settings = self._settings
        inputs = {**latents, "time": settings.time(time), "step": settings.time(step)}

        def build(network: Network) -> None:
            flow = FlowNetwork(network, settings, self._conditions, conditional)
            self._build(network, flow)

        variant = self._conditions.key(conditional)
        results = self._parts.run(
            "flow", inputs, build, taps=taps, variant=variant, capacity=FLOW_CAPACITY
        )
        velocities = {name: results.pop(f"{_VELOCITY}{name}") for name in self.shapes}
        if taps is not None:
            for name, array in results.items():
                taps(name, array)
        return velocities

    def _build(self, network: Network, flow: FlowNetwork) -> None:
        embedded = {name: self._embed(network, name) for name in self.shapes}
        time = network.tap("t_embedder", flow.time(network.tensors["time"], "flow.t_embedder"))
        step = network.tap("d_embedder", flow.time(network.tensors["step"], "flow.d_embedder"))
        time = network.add(time, step)
        pose = network.concat([embedded[name] for name in self._pose], axis=1)
        streams = {POSE: pose, SHAPE: embedded[SHAPE]}
        for index in range(self._settings.blocks):
            with network.scope(f"block{index}"):
                streams = self._block(network, flow, index, streams, time)
        start = 0
        for name in [*self._pose, SHAPE]:
            x = streams[SHAPE]
            if name != SHAPE:
                x = network.narrow(streams[POSE], 1, start, self.shapes[name][1])
                start += self.shapes[name][1]
            normed = network.normalize(x, self._settings.output_epsilon)
            velocity = network.dense(normed, f"flow.latent_mapping.{name}.out_layer")
            network.output(f"{_VELOCITY}{name}", velocity)

    def _embed(self, network: Network, name: str) -> Tensor:
        module = f"latent_mapping.{name}"
        x = network.dense(network.tensors[name], f"flow.{module}.input_layer")
        network.tap(f"{module}.input_layer", x)
        return network.add(x, network.weight(f"flow.{module}.pos_emb"))

    def _block(
        self,
        network: Network,
        flow: FlowNetwork,
        index: int,
        streams: dict[str, Tensor],
        time: Tensor,
    ) -> dict[str, Tensor]:
        module, stage = f"flow.blocks.{index}", f"block{index}"
        settings = self._settings
        modulation = flow.modulation(time, module, f"{stage}.adaLN_modulation")
        attended = self._self_attention(network, flow, index, streams, modulation)
        results: dict[str, Tensor] = {}
        for name in _STREAMS:
            update = network.multiply(attended[name], modulation.gate_msa)
            x = network.add(streams[name], update)
            normed = network.layer_norm(
                x,
                network.weight(f"{module}.norm2.{name}.weight"),
                network.weight(f"{module}.norm2.{name}.bias"),
                settings.norm2_epsilon,
                joined=name == SHAPE,
            )
            cross = _cross_attention(index, name)
            update = flow.cross_attention(normed, cross, joined=name == SHAPE)
            x = network.add(x, network.tap(f"{stage}.cross_attn.{name}", update))
            normed = network.layer_norm(
                x,
                modulation.scale_mlp,
                modulation.shift_mlp,
                settings.norm3_epsilon,
                joined=name == SHAPE,
            )
            update = feed_forward(network, normed, f"{module}.mlp.{name}")
            network.tap(f"{stage}.mlp.{name}", update)
            x = network.add(x, network.multiply(update, modulation.gate_mlp))
            results[name] = network.tap(f"{stage}.{name}", x)
        return results

    def _self_attention(
        self,
        network: Network,
        flow: FlowNetwork,
        index: int,
        streams: dict[str, Tensor],
        modulation: Modulation,
    ) -> dict[str, Tensor]:
        """Shape tokens attend to themselves, pose tokens to all.

        What is done for the few pose tokens is not joined: one number is all of a modality, and
        rounding shows in it.
        """
        module = f"flow.blocks.{index}.self_attn"
        projected: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        for name in _STREAMS:
            normed = network.layer_norm(
                streams[name],
                modulation.scale_msa,
                modulation.shift_msa,
                self._settings.norm1_epsilon,
                joined=name == SHAPE,
            )
            projected[name] = flow.queries_keys_values(normed, module, f".{name}")
        q, k, v = projected[SHAPE]
        pose_q, pose_k, pose_v = projected[POSE]
        attended = {
            SHAPE: attend(network, q, k, v),
            POSE: attend(
                network,
                pose_q,
                network.concat([pose_k, k], axis=1),
                network.concat([pose_v, v], axis=1),
                joined=False,
            ),
        }
        return {
            name: network.tap(
                f"block{index}.self_attn.{name}",
                network.dense(attended[name], f"{module}.to_out.{name}"),
            )
            for name in _STREAMS
        }

    def memory(self) -> dict[str, int]:
        """Bytes of weights, of intermediates, and of kept keys and values."""
        return {**super().memory(), "condition": self._conditions.size}

    def close(self) -> None:
        """Frees graphs, kept tensors and weights; the backend stays open."""
        self._parts.graphs.close()
        self._conditions.close()
        super().close()


def _cross_attention(index: int, stream: str) -> str:
    return f"flow.blocks.{index}.cross_attn.{stream}"

"""What both flow transformers have in common: times, modulation, kept keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.graph import MAX_TENSORS, FloatArray
from sam3d_gguf.runtime.ggml.network import Network, Parts
from sam3d_gguf.runtime.ggml.store import KeptTensors, Tensor, WeightStore
from sam3d_gguf.runtime.objects.neural_layers import attend
from sam3d_gguf.runtime.objects.neural_settings import Settings
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.closing import Closing
from sam3d_gguf.schemas.errors import InputError

FLOW_CAPACITY = 2 * MAX_TENSORS
"""A whole flow transformer is one graph, so that its tokens stay on the device."""


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """The sizes and numbers of a flow transformer.

    Attributes:
        condition_channels: of the condition tokens.
        embedding_length: of the cosines and sines of a time.
    """

    channels: int
    condition_channels: int
    heads: int
    blocks: int
    latent_channels: int
    embedding_length: int
    max_period: float
    norm1_epsilon: float
    norm2_epsilon: float
    norm3_epsilon: float
    output_epsilon: float
    qk_epsilon: float

    @classmethod
    def of(cls, weights: Weights) -> FlowSettings:
        """Reads them from the part's metadata.

        Raises:
            ContractError: a key is missing.
        """
        settings = Settings(weights)
        return cls(
            channels=settings.integer("flow.channels"),
            condition_channels=settings.integer("flow.condition_channels"),
            heads=settings.integer("flow.attention.head_count"),
            blocks=settings.integer("flow.block_count"),
            latent_channels=settings.integer("flow.latent_channels"),
            embedding_length=settings.integer("flow.time.embedding_length"),
            max_period=settings.real("flow.time.max_period"),
            norm1_epsilon=settings.real("flow.norm1_epsilon"),
            norm2_epsilon=settings.real("flow.norm2_epsilon"),
            norm3_epsilon=settings.real("flow.norm3_epsilon"),
            output_epsilon=settings.real("flow.output_norm_epsilon"),
            qk_epsilon=settings.real("flow.attention.qk_norm_epsilon"),
        )

    def time(self, time: float) -> FloatArray:
        """[1, embedding_length]: cosines, then sines of a time that is already scaled."""
        half = self.embedding_length // 2
        exponents = np.arange(half, dtype=np.float32) * np.float32(-math.log(self.max_period))
        exponents /= np.float32(half)
        frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)
        angles = np.float64(time) * frequencies.astype(np.float64)
        return np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float32)[None]


def flow_store(backend: Backend, weights: Weights) -> WeightStore:
    """Loads the tensors of the flow transformer; gammas times the root of a head's channels."""
    derived: dict[str, npt.NDArray[np.float32]] = {}
    names: list[str] = []
    for name in weights.tensors:
        if "_rms_norm." in name:
            gamma = weights.array(name)
            derived[name] = gamma * np.float32(math.sqrt(gamma.shape[1]))
        elif name.startswith("flow."):
            names.append(name)
    return WeightStore(backend, weights, names, derived)


class Conditions(Closing):
    """The keys and values of cross-attention, computed once and kept on the device.

    Those of the unconditional tokens, which are all zero, are one token's: attention to equal
    values gives that value.
    """

    def __init__(self, parts: Parts, modules: tuple[str, ...], settings: FlowSettings) -> None:
        self._parts = parts
        self._modules = modules
        self._settings = settings
        self._kept: dict[tuple[bool, int], KeptTensors] = {}
        self._current: dict[bool, int] = {}

    def prepare(self, tokens: FloatArray) -> None:
        """Computes the keys and values of [1, L, condition channels].

        Raises:
            InputError: the tokens have another shape.
        """
        wanted = self._settings.condition_channels
        if tokens.ndim != 3 or len(tokens) != 1 or tokens.shape[2] != wanted or not tokens.size:
            raise InputError(
                f"the condition tokens have the shape {tokens.shape}", expected=f"[1, L, {wanted}]"
            )
        self._fill(True, tokens)
        if False not in self._current:
            self._fill(False, np.zeros((1, 1, wanted), np.float32))

    def _fill(self, conditional: bool, tokens: FloatArray) -> None:
        count = tokens.shape[1]
        kept = self._kept.get((conditional, count))
        if kept is None:
            shape = (1, count, 2 * self._settings.channels)
            shapes = {str(number): shape for number in range(len(self._modules))}
            purpose = "the keys and values of the condition tokens"
            kept = KeptTensors(self._parts.backend, shapes, purpose)
            self._kept[conditional, count] = kept
        for number, module in enumerate(self._modules):

            def build(network: Network, module: str = module) -> None:
                network.output("kv", network.dense(network.tensors["tokens"], f"{module}.to_kv"))

            results = self._parts.run(f"{module}.to_kv", {"tokens": tokens}, build)
            kept.write(str(number), results["kv"])
        self._current[conditional] = count

    def key(self, conditional: bool) -> tuple[bool, int]:
        """What tells graphs that read these tensors from others.

        Raises:
            InputError: `prepare` was not called.
        """
        if conditional not in self._current:
            raise InputError("the flow has no condition tokens", action="Call prepare before.")
        return conditional, self._current[conditional]

    def tensor(self, conditional: bool, module: str) -> Tensor:
        """[1, L, 2 * channels] of a module."""
        return self._kept[self.key(conditional)][str(self._modules.index(module))]

    @property
    def size(self) -> int:
        """Bytes on the device."""
        return sum(kept.size for kept in self._kept.values())

    def close(self) -> None:
        """Frees the tensors; graphs that use them must be closed before."""
        for kept in self._kept.values():
            kept.close()
        self._kept.clear()
        self._current.clear()


@dataclass(frozen=True, slots=True)
class Modulation:
    """What a block does to its norms and updates; [channels] each.

    Attributes:
        scale_msa, scale_mlp: with 1 added.
    """

    shift_msa: Tensor
    scale_msa: Tensor
    gate_msa: Tensor
    shift_mlp: Tensor
    scale_mlp: Tensor
    gate_mlp: Tensor


class FlowNetwork:
    """The layers of a flow transformer's graph."""

    def __init__(
        self, network: Network, settings: FlowSettings, conditions: Conditions, conditional: bool
    ) -> None:
        self._network = network
        self._settings = settings
        self._conditions = conditions
        self._conditional = conditional

    def time(self, features: Tensor, module: str) -> Tensor:
        """The embedding of a time: [1, channels]."""
        network = self._network
        hidden = network.silu(network.dense(features, f"{module}.mlp.0"))
        return network.dense(hidden, f"{module}.mlp.2")

    def pieces(self, time: Tensor, module: str, count: int, stage: str = "") -> list[Tensor]:
        """linear(silu(time)) in that many equal pieces, one axis each."""
        network = self._network
        product = network.dense(network.silu(time), module)
        if stage:
            network.tap(stage, product)
        flat = network.reshape(product, product.shape[1:])
        size = flat.shape[0] // count
        return [network.narrow(flat, 0, index * size, size) for index in range(count)]

    def modulation(self, time: Tensor, module: str, stage: str) -> Modulation:
        """The modulation of a block."""
        pieces = self.pieces(time, f"{module}.adaLN_modulation.1", 6, stage)
        for index in (1, 4):
            pieces[index] = self._network.increment(pieces[index])
        return Modulation(*pieces)

    def queries_keys_values(
        self, x: Tensor, module: str, stream: str = ""
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[1, N, heads, width] each; queries and keys normed."""
        network, settings = self._network, self._settings
        qkv = network.dense(x, f"{module}.to_qkv{stream}")
        q, k, v = (
            network.split_heads(qkv, part * settings.channels, settings.channels, settings.heads)
            for part in range(3)
        )

        def normed(each: Tensor, name: str) -> Tensor:
            gamma = network.weight(f"{module}.{name}_rms_norm{stream}.gamma")
            return network.multiply(network.l2_normalize(each, settings.qk_epsilon), gamma)

        return normed(q, "q"), normed(k, "k"), v

    def cross_attention(self, x: Tensor, module: str, *, joined: bool = True) -> Tensor:
        """Attention to the condition tokens."""
        network, settings = self._network, self._settings
        kv = self._conditions.tensor(self._conditional, module)
        q = network.dense(x, f"{module}.to_q")
        channels, heads = settings.channels, settings.heads
        attended = attend(
            network,
            network.split_heads(q, 0, channels, heads),
            network.split_heads(kv, 0, channels, heads),
            network.split_heads(kv, channels, channels, heads),
            joined=joined,
        )
        return network.dense(attended, f"{module}.to_out")

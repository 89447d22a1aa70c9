"""What the graphs of the neural parts have in common: dimensions, weights, small networks."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sam3d_gguf.runtime.body.neural import FloatArray, Taps
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.errors import CancelledError
from sam3d_gguf.runtime.ggml.graph import Arena, Graph, GraphBuilder, Graphs
from sam3d_gguf.runtime.ggml.store import Tensor, WeightStore
from sam3d_gguf.runtime.weights import Weights

ENCODER = "backbone.encoder"
DECODER_EPSILON = 1e-6

_NOT_IN_GRAPHS = re.compile(
    r"\.(qkv\.bias|bias_mask|periods|positional_encoding_gaussian_matrix|mask_token"
    r"|joint_rotation|(scale|hand_pose)_comps|(right_wrist|root)_coords|local_to_world_wrist)$"
)


@dataclass(frozen=True, slots=True)
class BodyDimensions:
    """The sizes of one SAM 3D Body, read from the shapes of its tensors.

    Attributes:
        channels: C, of the backbone.
        heads: of the backbone's attention.
        decoder_dim: DIM.
        decoder_heads: of the decoder's attention; no shape tells it.
    """

    channels: int
    depth: int
    heads: int
    patch: int
    storage_tokens: int
    decoder_dim: int
    decoder_depth: int
    decoder_heads: int

    @classmethod
    def of(cls, weights: Weights, decoder_heads: int) -> BodyDimensions:
        """Reads the sizes from checked weights."""
        channels = weights.tensor(f"{ENCODER}.cls_token").shape[-1]
        periods = weights.tensor(f"{ENCODER}.rope_embed.periods").shape[0]
        return cls(
            channels=channels,
            depth=_layers(weights, rf"{ENCODER}\.blocks"),
            heads=channels // (4 * periods),
            patch=weights.tensor(f"{ENCODER}.patch_embed.proj.weight").shape[-1],
            storage_tokens=weights.tensor(f"{ENCODER}.storage_tokens").shape[1],
            decoder_dim=weights.tensor("decoder.norm_final.weight").shape[0],
            decoder_depth=_layers(weights, r"decoder\.layers"),
            decoder_heads=decoder_heads,
        )


def _layers(weights: Weights, prefix: str) -> int:
    pattern = re.compile(rf"{prefix}\.(\d+)\.")
    found = [int(match[1]) for name in weights.tensors if (match := pattern.match(name))]
    return max(found, default=-1) + 1


def body_store(backend: Backend, weights: Weights) -> WeightStore:
    """Loads the tensors of the Body's graphs, and those that they need in another form."""
    names = [
        name
        for name, tensor in weights.tensors.items()
        if tensor.type in ("F32", "F16", "BF16") and not _NOT_IN_GRAPHS.search(name)
    ]
    derived: dict[str, npt.NDArray[np.float32]] = {}
    for name in weights.tensors:
        if name.endswith(".qkv.bias"):
            derived[name] = weights.array(name) * weights.array(f"{name}_mask")
        elif name.endswith(("gaussian_matrix", "scale_comps", "hand_pose_comps")):
            derived[name] = np.ascontiguousarray(weights.array(name).T)
    return WeightStore(backend, weights, names, derived)


class Parts:
    """The weights and graphs that the neural parts of one model share."""

    def __init__(self, store: WeightStore, backend: Backend) -> None:
        self.store = store
        self.backend = backend
        self.graphs = Graphs(backend)
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Ends the current or next run before its next stage. Any thread may call it."""
        self._cancelled.set()

    def run(
        self,
        name: str,
        inputs: dict[str, FloatArray],
        build: Callable[[Network], None],
        *,
        taps: Taps | None = None,
        variant: Hashable = None,
    ) -> dict[str, FloatArray]:
        """Runs the graph of that name, building it at the first use of its input shapes.

        Args:
            variant: what else than the input shapes the graph depends on.

        Raises:
            CancelledError: `cancel` was called.
        """
        if self._cancelled.is_set():
            self._cancelled.clear()
            raise CancelledError(f"the run was cancelled before {name}")
        shapes = tuple((key, array.shape) for key, array in inputs.items())

        def make(arena: Arena) -> Graph:
            network = Network(arena, name, self.store, tapped=taps is not None)
            for key, shape in shapes:
                network.tensors[key] = network.input(key, shape)
            build(network)
            return network.build()

        return self.graphs.get((name, shapes, taps is not None, variant), make).run(inputs)

    def memory(self) -> dict[str, int]:
        """Bytes of weights, and of intermediates."""
        return {
            "weights": self.store.size,
            "intermediates": self.graphs.arena.size,
        }

    def close(self) -> None:
        """Frees graphs and weights."""
        self.graphs.close()
        self.store.close()


class Network(GraphBuilder):
    """A graph builder that finds weights by the names of the original's modules."""

    def __init__(self, arena: Arena, name: str, store: WeightStore, *, tapped: bool) -> None:
        super().__init__(arena, name, tapped=tapped)
        self.tensors: dict[str, Tensor] = {}
        self._store = store

    def weight(self, name: str) -> Tensor:
        """A stored tensor."""
        return self._store[name]

    def dense(self, x: Tensor, module: str) -> Tensor:
        """An nn.Linear with bias."""
        return self.linear(x, self.weight(f"{module}.weight"), self.weight(f"{module}.bias"))

    def norm(self, x: Tensor, module: str, epsilon: float = DECODER_EPSILON) -> Tensor:
        """An nn.LayerNorm."""
        return self.layer_norm(
            x, self.weight(f"{module}.weight"), self.weight(f"{module}.bias"), epsilon
        )

    def ffn(self, x: Tensor, module: str) -> Tensor:
        """The original's FFN of two layers with a ReLU between, without identity."""
        hidden = self.relu(self.dense(x, f"{module}.layers.0.0"))
        return self.dense(hidden, f"{module}.layers.1")

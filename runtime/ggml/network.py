"""What the graphs of all neural parts have in common: weights by name, graphs by name and shape."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.errors import CancelledError
from sam3d_gguf.runtime.ggml.graph import (
    MAX_TENSORS,
    Arena,
    FloatArray,
    Graph,
    GraphBuilder,
    Graphs,
    InputArray,
)
from sam3d_gguf.runtime.ggml.store import Tensor, WeightStore
from sam3d_gguf.schemas.closing import Closing


class Taps(Protocol):
    """Receives every named intermediate, in execution order, under its stage name.

    A stage name is a fixture name without what counts it: `backbone.block00.norm1` for
    `01.body.013.backbone.block00.norm1`. The array may be kept: it is not reused.
    """

    def __call__(self, name: str, array: npt.NDArray[np.generic], /) -> None: ...


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
        inputs: Mapping[str, InputArray],
        build: Callable[[Network], None],
        *,
        rows: Mapping[str, int] | None = None,
        taps: Taps | None = None,
        variant: Hashable = None,
        capacity: int = MAX_TENSORS,
    ) -> dict[str, FloatArray]:
        """Runs the graph of that name, building it at the first use of its input shapes.

        Args:
            inputs: float32 arrays, and int32 arrays of row numbers.
            rows: for each of the latter, what its numbers must be below.
            variant: what else than the input shapes the graph depends on.
            capacity: tensors that the graph may have.

        Raises:
            CancelledError: `cancel` was called.
        """
        if self._cancelled.is_set():
            self._cancelled.clear()
            raise CancelledError(f"the run was cancelled before {name}")
        limits = rows or {}
        shapes = tuple((key, array.shape, limits.get(key)) for key, array in inputs.items())

        def make(arena: Arena) -> Graph:
            network = Network(arena, name, self.store, tapped=taps is not None, capacity=capacity)
            for key, shape, limit in shapes:
                if limit is None:
                    network.tensors[key] = network.input(key, shape)
                else:
                    network.tensors[key] = network.index_input(key, shape[0], limit)
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

    def __init__(
        self,
        arena: Arena,
        name: str,
        store: WeightStore,
        *,
        tapped: bool,
        capacity: int = MAX_TENSORS,
    ) -> None:
        super().__init__(arena, name, tapped=tapped, capacity=capacity)
        self.tensors: dict[str, Tensor] = {}
        self._store = store

    def weight(self, name: str) -> Tensor:
        """A stored tensor."""
        return self._store[name]

    def has(self, name: str) -> bool:
        """Whether a tensor is stored."""
        return name in self._store

    def dense(self, x: Tensor, module: str) -> Tensor:
        """An nn.Linear with bias."""
        return self.linear(x, self.weight(f"{module}.weight"), self.weight(f"{module}.bias"))

    def norm(self, x: Tensor, module: str, epsilon: float = 1e-6) -> Tensor:
        """An nn.LayerNorm."""
        return self.layer_norm(
            x, self.weight(f"{module}.weight"), self.weight(f"{module}.bias"), epsilon
        )


class DeviceModel(Closing):
    """What may be asked of every network on a device. Not safe for concurrent calls, except `cancel`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def cancel(self) -> None:
        """Ends the current or next run before its next stage. Any thread may call it."""
        self._parts.cancel()

    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that were built so far."""
        return self._parts.graphs.all()

    def memory(self) -> dict[str, int]:
        """Bytes of weights, and of intermediates."""
        return self._parts.memory()

    def close(self) -> None:
        """Frees graphs and weights; the backend stays open."""
        self._parts.close()

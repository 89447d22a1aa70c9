"""`MhrProducts` on GGML.

Source: pymomentum and the MHR release, as the model's TorchScript computes it; tensor names are
those of the GGUF.
"""

from __future__ import annotations

import numpy as np

from sam3d_gguf.runtime.body.neural import FloatArray
from sam3d_gguf.runtime.body.neural_parts import Network, Parts
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.graph import Graph
from sam3d_gguf.runtime.ggml.store import WeightStore
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.closing import Closing
from sam3d_gguf.schemas.errors import ContractError


class GgmlMhrProducts(Closing):
    """The products of MHR on one device. See `MhrProducts` for the methods.

    Not safe for concurrent calls, except `cancel`.
    """

    def __init__(self, backend: Backend, weights: Weights) -> None:
        """Places the weights on the device.

        Raises:
            ContractError: a tensor is missing, or an index of the sparse layer is out of range.
            BackendError: the device has too little memory.
        """
        self.backend = backend
        derived = {
            "identity.vectors": _shapes_last(weights, "identity.vectors"),
            "identity.base": weights.array("identity.base").reshape(-1),
            "expression.vectors": _shapes_last(weights, "expression.vectors"),
            "pose.sparse": _dense_layer(weights),
        }
        names = ["parameter.matrix", "pose.dense.weight"]
        self._parts = Parts(WeightStore(backend, weights, names, derived), backend)

    def joint_parameters(self, parameters: FloatArray) -> FloatArray:
        """[B, 204] model parameters to [B, 889] joint parameters."""

        def build(network: Network) -> None:
            x = network.tensors["x"]
            # The columns after the model's parameters belong to identity, whose values are 0.
            matrix = network.narrow(network.weight("parameter.matrix"), 1, 0, x.shape[1])
            network.output("y", network.matmul(x, matrix))

        return self._parts.run("mhr.joint_parameters", {"x": parameters}, build)["y"]

    def identity(self, coefficients: FloatArray) -> FloatArray:
        """[B, 45] to the identity's rest mesh [B, V, 3]."""

        def build(network: Network) -> None:
            network.output(
                "y",
                network.linear(
                    network.tensors["x"],
                    network.weight("identity.vectors"),
                    network.weight("identity.base"),
                ),
            )

        results = self._parts.run("mhr.identity", {"x": coefficients}, build)
        return results["y"].reshape(len(coefficients), -1, 3)

    def expression(self, coefficients: FloatArray) -> FloatArray:
        """[B, 72] to the expression's offsets [B, V, 3]."""

        def build(network: Network) -> None:
            weight = network.weight("expression.vectors")
            network.output("y", network.matmul(network.tensors["x"], weight))

        results = self._parts.run("mhr.expression", {"x": coefficients}, build)
        return results["y"].reshape(len(coefficients), -1, 3)

    def correctives(self, features: FloatArray) -> tuple[FloatArray, FloatArray]:
        """[B, 750] pose features to the hidden [B, 3000] and the offsets [B, V, 3]."""

        def build(network: Network) -> None:
            hidden = network.relu(
                network.matmul(network.tensors["x"], network.weight("pose.sparse"))
            )
            network.output("hidden", hidden)
            network.output("offsets", network.matmul(hidden, network.weight("pose.dense.weight")))

        results = self._parts.run("mhr.correctives", {"x": features}, build)
        return results["hidden"], results["offsets"].reshape(len(features), -1, 3)

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


def _shapes_last(weights: Weights, name: str) -> FloatArray:
    """[shapes, V, 3] to [3 V, shapes]."""
    array = weights.array(name)
    return np.ascontiguousarray(array.reshape(len(array), -1).T)


def _dense_layer(weights: Weights) -> FloatArray:
    """The sparse first layer as [hidden, features]."""
    rows, columns = weights.array("pose.sparse.indices")
    hidden = weights.tensor("pose.dense.weight").shape[1]
    features = 6 * (weights.tensor("skeleton.parents").shape[0] - 2)
    if not (_within(rows, hidden) and _within(columns, features)):
        raise ContractError(
            "an index of pose.sparse.indices is out of range",
            where=str(weights.path),
            expected=f"rows below {hidden} and columns below {features}",
        )
    dense = np.zeros((hidden, features), np.float32)
    np.add.at(dense, (rows, columns), weights.array("pose.sparse.weight"))
    return dense


def _within(indices: FloatArray, end: int) -> bool:
    return bool(np.all((indices >= 0) & (indices < end)))

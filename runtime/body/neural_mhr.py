"""`MhrProducts` on GGML.

Source: pymomentum and the MHR release, as the model's TorchScript computes it; tensor names are
those of the GGUF.
"""

from __future__ import annotations

import numpy as np

from sam3d_gguf.runtime.body.neural import FloatArray, MhrVertices
from sam3d_gguf.runtime.geometry.arrays import Int32
from sam3d_gguf.runtime.ggml.backend import Backend
from sam3d_gguf.runtime.ggml.graph import Graph
from sam3d_gguf.runtime.ggml.network import Network, Parts, Taps
from sam3d_gguf.runtime.ggml.store import Tensor, WeightStore
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.closing import Closing
from sam3d_gguf.schemas.errors import ContractError

_SKIN_INDICES = ("skin.vertices", "skin.joints")
_BLOCK = 16
"""Of both axes of the skinning table: the CPU's fast product takes whole blocks alone."""


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
            "skin.table": _skin_table(weights),
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

    def mesh(
        self,
        identity: FloatArray,
        expression: FloatArray | None,
        features: FloatArray | None,
        matrices: FloatArray,
        *,
        taps: Taps | None = None,
    ) -> MhrVertices:
        """The mesh, at rest and posed; see `MhrProducts`."""
        inputs = {"identity": identity, "matrices": _columns(matrices)}
        if expression is not None:
            inputs["expression"] = expression
        if features is not None:
            inputs["features"] = features
        results = self._parts.run("mhr.mesh", inputs, _mesh, taps=taps)
        rest, posed = results.pop("rest"), results.pop("posed")
        if taps is not None:
            for name, array in results.items():
                taps(name, array)
        return MhrVertices(rest, posed)

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


def _mesh(network: Network) -> None:
    """Adds up the rest mesh in the original's order, then skins it."""
    x = network.tensors
    rest = network.linear(
        x["identity"], network.weight("identity.vectors"), network.weight("identity.base")
    )
    vertices = (rest.shape[0], rest.shape[1] // 3, 3)
    rest = network.tap("rest_identity", network.reshape(rest, vertices))
    if "expression" in x:
        offsets = network.matmul(x["expression"], network.weight("expression.vectors"))
        rest = network.add(rest, network.reshape(offsets, vertices))
        network.tap("rest_expression", rest)
    if "features" in x:
        hidden = network.relu(network.matmul(x["features"], network.weight("pose.sparse")))
        network.tap("corrective_hidden", hidden)
        offsets = network.matmul(hidden, network.weight("pose.dense.weight"))
        offsets = network.tap("corrective_offsets", network.reshape(offsets, vertices))
        rest = network.add(rest, offsets)
    network.output("rest", rest)
    network.output("posed", _skinned(network, rest, x["matrices"]))


def _skinned(network: Network, rest: Tensor, columns: Tensor) -> Tensor:
    """Linear blend skinning of [B, V, 3] by the [12 B, J] entries of the joints' matrices."""
    batch, vertices, _ = rest.shape
    blended = network.matmul(columns, network.weight("skin.table"))
    blended = network.reshape(blended, (batch, 3, 4, blended.shape[1]))
    blended = network.narrow(blended, 3, 0, vertices)
    points = network.reshape(network.permute(rest, (0, 2, 1)), (batch, 1, 3, vertices))
    turned = network.multiply(network.narrow(blended, 2, 0, 3), points)
    posed = network.narrow(turned, 2, 0, 1)
    for part in (
        network.narrow(turned, 2, 1, 1),
        network.narrow(turned, 2, 2, 1),
        network.narrow(blended, 2, 3, 1),
    ):
        posed = network.add(posed, part)
    return network.permute(network.reshape(posed, (batch, 3, vertices)), (0, 2, 1))


def _columns(matrices: FloatArray) -> FloatArray:
    """[B, J, 3, 4] to [12 B, J], the joints filled up with zeros."""
    batch, joints = matrices.shape[:2]
    columns = np.zeros((batch, 12, _whole(joints)), np.float32)
    columns[..., :joints] = matrices.reshape(batch, joints, 12).swapaxes(1, 2)
    return columns.reshape(12 * batch, -1)


def _whole(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _shapes_last(weights: Weights, name: str) -> FloatArray:
    """[shapes, V, 3] to [3 V, shapes]."""
    array = weights.array(name)
    return np.ascontiguousarray(array.reshape(len(array), -1).T)


def _dense_layer(weights: Weights) -> FloatArray:
    """The sparse first layer as [hidden, features]."""
    hidden = weights.tensor("pose.dense.weight").shape[1]
    features = 6 * (weights.tensor("skeleton.parents").shape[0] - 2)
    dense = np.zeros((hidden, features), np.float32)
    _scatter(weights, "pose.sparse.weight", dense, *weights.array("pose.sparse.indices"))
    return dense


def _skin_table(weights: Weights) -> FloatArray:
    """The skinning weights as [V, J], filled up with zeros to whole blocks."""
    vertices = weights.tensor("identity.base").shape[0]
    joints = weights.tensor("skeleton.parents").shape[0]
    table = np.zeros((_whole(vertices), _whole(joints)), np.float32)
    inside = table[:vertices, :joints]
    _scatter(weights, "skin.weights", inside, *map(weights.array, _SKIN_INDICES))
    return table


def _scatter(weights: Weights, name: str, dense: FloatArray, rows: Int32, columns: Int32) -> None:
    """Adds the values of a tensor at their rows and columns."""
    if not (_within(rows, dense.shape[0]) and _within(columns, dense.shape[1])):
        raise ContractError(
            f"an index of {name} is out of range",
            where=str(weights.path),
            expected=f"rows below {dense.shape[0]} and columns below {dense.shape[1]}",
        )
    np.add.at(dense, (rows, columns), weights.array(name))


def _within(indices: Int32, end: int) -> bool:
    return bool(np.all((indices >= 0) & (indices < end)))

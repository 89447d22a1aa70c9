"""Every operation of the graph builder computes what NumPy computes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from sam3d_gguf.runtime.ggml import graph as graph_module
from sam3d_gguf.runtime.ggml.backend import Backend, open_backend
from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.graph import (
    GATHER_STEP,
    MAX_TENSORS,
    Arena,
    FloatArray,
    Graph,
    GraphBuilder,
)
from sam3d_gguf.runtime.ggml.library import load_library
from sam3d_gguf.runtime.ggml.store import Tensor

Build = Callable[[GraphBuilder, Sequence[Tensor]], Tensor]
Reference = Callable[[Sequence[FloatArray]], FloatArray]
Shapes = list[tuple[int, ...]]


@pytest.fixture(name="arena")
def _arena() -> Iterator[Arena]:
    with open_backend(load_library(), "cpu", threads=2) as backend:
        arena = Arena(backend)
        yield arena
        arena.close()


def normal(*shape: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def softmax(x: FloatArray) -> FloatArray:
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    result: FloatArray = exponentials / exponentials.sum(-1, keepdims=True)
    return result


def attention(q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
    attended = softmax(q @ k.swapaxes(2, 3) / np.float32(math.sqrt(q.shape[3]))) @ v
    return attended.transpose(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1)


def layer_norm(
    x: FloatArray, weight: FloatArray | np.float32, bias: FloatArray | np.float32
) -> FloatArray:
    centred = x - x.mean(-1, keepdims=True)
    result: FloatArray = (
        centred / np.sqrt(centred.var(-1, keepdims=True) + 1e-5) * weight + bias
    ).astype(np.float32)
    return result


def gelu(x: FloatArray) -> FloatArray:
    halves = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.ravel().tolist()]
    return np.array(halves, np.float32).reshape(x.shape)


def gelu_tanh(x: FloatArray) -> FloatArray:
    halves = [
        0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
        for v in x.ravel().tolist()
    ]
    return np.array(halves, np.float32).reshape(x.shape)


def neighbourhoods(x: FloatArray) -> FloatArray:
    """[C, X, Y, Z] to [X * Y * Z, C * 27]."""
    channels, *sides = x.shape
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (1, 1)))
    rows = [
        padded[:, i : i + 3, j : j + 3, k : k + 3].reshape(channels * 27)
        for i, j, k in np.ndindex(*sides)
    ]
    return np.array(rows)


OPERATIONS: dict[str, tuple[Shapes, Build, Reference]] = {
    "add": ([(2, 3, 5), (5,)], lambda g, t: g.add(t[0], t[1]), lambda a: a[0] + a[1]),
    "multiply": ([(2, 3, 5), (3, 5)], lambda g, t: g.multiply(t[0], t[1]), lambda a: a[0] * a[1]),
    "scale": ([(2, 3)], lambda g, t: g.scale(t[0], 2.5), lambda a: a[0] * np.float32(2.5)),
    "matmul": ([(2, 3, 9), (4, 9)], lambda g, t: g.matmul(t[0], t[1]), lambda a: a[0] @ a[1].T),
    "matmul of parts": (
        [(3, 4), (5, 10)],
        lambda g, t: g.matmul(t[0], g.narrow(t[1], 1, 6, 4)),
        lambda a: a[0] @ a[1][:, 6:].T,
    ),
    "linear": (
        [(2, 9), (4, 9), (4,)],
        lambda g, t: g.linear(t[0], t[1], t[2]),
        lambda a: a[0] @ a[1].T + a[2],
    ),
    "layer_norm": (
        [(2, 3, 16), (16,), (16,)],
        lambda g, t: g.layer_norm(t[0], t[1], t[2], 1e-5),
        lambda a: layer_norm(*a),
    ),
    "softmax": (
        [(2, 3, 7)],
        lambda g, t: g.softmax(t[0], 0.5),
        lambda a: softmax(a[0] * np.float32(0.5)),
    ),
    "relu": ([(3, 7)], lambda g, t: g.relu(t[0]), lambda a: np.maximum(a[0], 0)),
    "gelu": ([(3, 7)], lambda g, t: g.gelu(t[0]), lambda a: gelu(a[0])),
    "gelu_tanh": (
        [(3, 7), (7,)],
        lambda g, t: g.gelu_tanh(g.scale(t[0], 1), t[1]),
        lambda a: gelu_tanh(a[0] + a[1]),
    ),
    "neighbourhoods": (
        [(2, 3, 4, 5)],
        lambda g, t: g.neighbourhoods(g.narrow(g.pad_planes(t[0]), 1, 1, 4)),
        lambda a: neighbourhoods(a[0])[20:],
    ),
    "silu": ([(3, 7)], lambda g, t: g.silu(t[0]), lambda a: a[0] / (1 + np.exp(-a[0]))),
    "increment": ([(3, 7)], lambda g, t: g.increment(t[0]), lambda a: a[0] + np.float32(1)),
    "normalize": (
        [(2, 16, 3)],
        lambda g, t: g.normalize(g.permute(t[0], (0, 2, 1)), 1e-5),
        lambda a: layer_norm(a[0].swapaxes(1, 2), np.float32(1), np.float32(0)),
    ),
    "l2_normalize": (
        [(2, 3, 8)],
        lambda g, t: g.l2_normalize(g.narrow(t[0], 2, 2, 5), 2.0),
        lambda a: (
            (part := a[0][:, :, 2:7])
            / np.maximum(np.linalg.norm(part, axis=-1, keepdims=True), 2.0)
        ),
    ),
    "swiglu": (
        [(3, 7), (3, 7), (7,), (7,)],
        lambda g, t: g.swiglu(t[0], t[1], t[2], t[3]),
        lambda a: (a[0] + a[2]) / (1 + np.exp(-a[0] - a[2])) * (a[1] + a[3]),
    ),
    "rotate": (
        [(2, 3, 5, 8), (3, 1, 8), (3, 1, 8)],
        lambda g, t: g.rotate(t[0], t[1], t[2]),
        lambda a: a[0] * a[1] + np.roll(a[0], 4, axis=3) * a[2],
    ),
    "rotate a view": (
        [(2, 3, 60), (3, 1, 8), (3, 1, 8)],
        lambda g, t: g.rotate(g.split_heads(t[0], 8, 32, 4), t[1], t[2]),
        lambda a: (
            (part := a[0][:, :, 8:40].reshape(2, 3, 4, 8)) * a[1] + np.roll(part, 4, axis=3) * a[2]
        ),
    ),
    "concat": (
        [(2, 3, 4), (2, 1, 4), (2, 2, 4)],
        lambda g, t: g.concat(t, axis=1),
        lambda a: np.concatenate(a, axis=1),
    ),
    "concat of many": (
        [(2, 1), (2, 3), (2, 2), (2, 1), (2, 4)],
        lambda g, t: g.concat(t, axis=1),
        lambda a: np.concatenate(a, axis=1),
    ),
    "repeat": (
        [(1, 3)],
        lambda g, t: g.repeat(t[0], (2, 4, 3)),
        lambda a: np.broadcast_to(a[0], (2, 4, 3)),
    ),
    "reshape": ([(2, 6)], lambda g, t: g.reshape(t[0], (3, 4)), lambda a: a[0].reshape(3, 4)),
    "reshape of a view": (
        [(2, 6)],
        lambda g, t: g.reshape(g.permute(t[0], (1, 0)), (3, 4)),
        lambda a: a[0].T.reshape(3, 4),
    ),
    "permute": (
        [(2, 3, 4, 5)],
        lambda g, t: g.permute(t[0], (2, 0, 3, 1)),
        lambda a: a[0].transpose(2, 0, 3, 1),
    ),
    "narrow": ([(2, 5, 3)], lambda g, t: g.narrow(t[0], 1, 1, 3), lambda a: a[0][:, 1:4]),
    "split_heads": (
        [(2, 3, 12)],
        lambda g, t: g.split_heads(t[0], 4, 6, 2),
        lambda a: a[0][:, :, 4:10].reshape(2, 3, 2, 3),
    ),
    "attention": (
        [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)],
        lambda g, t: g.attention(t[0], t[1], t[2]),
        lambda a: attention(*a),
    ),
    "attention by products": (
        [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)],
        lambda g, t: g.attention(t[0], t[1], t[2], joined=False),
        lambda a: attention(*a),
    ),
    "attention to one key": (
        [(2, 3, 5, 8), (2, 1, 3, 8), (2, 1, 3, 8)],
        lambda g, t: g.attention(
            t[0], g.permute(t[1], (0, 2, 1, 3)), g.permute(t[2], (0, 2, 1, 3)), joined=False
        ),
        lambda a: attention(a[0], a[1].swapaxes(1, 2), a[2].swapaxes(1, 2)),
    ),
    "attention in tiles": (
        [(1, 2, 131, 64), (1, 2, 77, 64), (1, 2, 77, 64)],
        lambda g, t: g.attention(t[0], t[1], t[2]),
        lambda a: attention(*a),
    ),
}


def build(arena: Arena, shapes: Shapes, operation: Build) -> Graph:
    builder = GraphBuilder(arena, "test")
    inputs = [builder.input(str(index), shape) for index, shape in enumerate(shapes)]
    builder.output("y", operation(builder, inputs))
    return builder.build()


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation(arena: Arena, name: str) -> None:
    shapes, operation, reference = OPERATIONS[name]
    graph = build(arena, shapes, operation)
    for seed in (1, 100):
        inputs = [normal(*shape, seed=seed + index) for index, shape in enumerate(shapes)]
        found = graph.run({str(index): array for index, array in enumerate(inputs)})["y"]
        expected = reference(inputs)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
    graph.close()


def test_attention_by_products_in_pieces(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena.backend, "accelerator", None)  # its kernels need no pieces
    monkeypatch.setattr(graph_module, "_SCORES", 2 * 3 * 7 * 2)
    shapes: Shapes = [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)]
    graph = build(arena, shapes, lambda g, t: g.attention(t[0], t[1], t[2], joined=False))
    inputs = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    found = graph.run({str(index): array for index, array in enumerate(inputs)})["y"]
    np.testing.assert_allclose(found, attention(*inputs), rtol=2e-6, atol=2e-6)
    assert sum(node.operation == "SOFT_MAX" for node in graph.nodes()) == 3


def gathering(arena: Arena, rows: int = 5, first: int = GATHER_STEP) -> Graph:
    """Three of the indices, gathered from a [5, 3]."""
    builder = GraphBuilder(arena, "gathering")
    x, indices = builder.input("x", (5, 3)), builder.index_input("indices", GATHER_STEP + 3, rows)
    builder.output("y", builder.gather(x, builder.narrow(indices, 0, first, 3)))
    return builder.build()


def test_rows_are_gathered_by_number(arena: Arena) -> None:
    x, graph = normal(5, 3), gathering(arena)
    for indices in ([4, 0, 4], [1, 1, 2]):
        numbers = np.array([3] * GATHER_STEP + indices, np.int32)
        found = graph.run({"x": x, "indices": numbers})["y"]
        np.testing.assert_array_equal(found, x[indices])


@pytest.mark.parametrize(
    ("kind", "last", "message"),
    [
        (np.int32, [1, 2, 5], r"holds 0\.\.5 \(int32\); expected int32 of 0\.\.4"),
        (np.int32, [-1, 2, 3], r"holds -1\.\.3"),
        (np.float32, [1, 2, 3], "float32"),
    ],
)
def test_wrong_row_numbers_are_refused(
    arena: Arena, kind: type[np.float32 | np.int32], last: list[int], message: str
) -> None:
    graph = gathering(arena)
    indices = np.array([0] * GATHER_STEP + last, kind)
    inputs: dict[str, Any] = {"x": normal(5, 3), "indices": indices}
    with pytest.raises(BackendError, match=message):
        graph.run(inputs)


def test_gathering_where_vulkan_would_end_the_process_is_refused(arena: Arena) -> None:
    with pytest.raises(BackendError, match="gather from byte 4 does not take"):
        gathering(arena, first=1)


def test_a_part_that_begins_elsewhere_is_copied_before_rows_are_gathered(arena: Arena) -> None:
    builder = GraphBuilder(arena, "gathering")
    x, indices = builder.input("x", (5, 3)), builder.index_input("indices", 2, 3)
    builder.output("y", builder.gather(builder.narrow(x, 0, 1, 3), indices))
    graph, given = builder.build(), normal(5, 3)
    found = graph.run({"x": given, "indices": np.array([2, 0], np.int32)})["y"]
    np.testing.assert_array_equal(found, given[[3, 1]])
    assert "CONT" in {node.operation for node in graph.nodes()}


def test_gathering_from_too_few_rows_is_refused(arena: Arena) -> None:
    with pytest.raises(BackendError, match="gather does not take"):
        gathering(arena, rows=6)


def test_graphs_of_one_arena_take_turns(arena: Arena) -> None:
    small = build(arena, [(4, 8)], lambda g, t: g.relu(g.scale(t[0], -1)))
    large = build(arena, [(64, 8)], lambda g, t: g.softmax(g.scale(g.relu(t[0]), 2), 1))
    a, b = normal(4, 8), normal(64, 8)
    for _ in range(3):
        np.testing.assert_array_equal(small.run({"0": a})["y"], np.maximum(-a, 0))
        expected = softmax(np.maximum(b, 0) * np.float32(2))
        np.testing.assert_allclose(large.run({"0": b})["y"], expected, rtol=1e-5, atol=1e-6)


class CountingArena(Arena):
    """Notes which graphs it measures, which it does before it places them."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.measured: list[int] = []

    def _measure(self, graph: Graph) -> int:
        found = super()._measure(graph)
        self.measured.append(found)
        return found


def test_graphs_keep_their_places_until_the_buffer_grows() -> None:
    with open_backend(load_library()) as backend:
        arena = CountingArena(backend)
        graphs = [build(arena, [(rows, 8)], lambda g, t: g.scale(t[0], 2)) for rows in (4, 64)]
        for _ in range(3):
            for graph, rows in zip(graphs, (4, 64), strict=True):
                graph.run({"0": normal(rows, 8)})
        small, large, *again = arena.measured
        assert small < large
        assert again == [small]
        arena.close()


def test_taps_are_results_only_of_a_tapped_graph(arena: Arena) -> None:
    x = normal(3, 4)
    for tapped, names in ((False, {"y"}), (True, {"y", "stage"})):
        builder = GraphBuilder(arena, "test", tapped=tapped)
        with builder.scope("block"):
            stage = builder.tap("stage", builder.relu(builder.input("x", (3, 4))))
            builder.output("y", builder.scale(stage, 3))
        graph = builder.build()
        results = graph.run({"x": x})
        assert results.keys() == names
        np.testing.assert_array_equal(results["y"], np.maximum(x, 0) * np.float32(3))
        if tapped:
            np.testing.assert_array_equal(results["stage"], np.maximum(x, 0))
        assert [node.name for node in graph.nodes()] == ["stage", "block.scale.3"]
        assert [node.operation for node in graph.nodes()] == ["RELU", "SCALE"]
        assert {(node.buffer, node.backend) for node in graph.nodes()} == {("CPU", "CPU")}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"inputs are \[\]"),
        ({"0": normal(2, 3), "1": normal(1)}, r"expected \['0'\]"),
        ({"0": normal(3, 2)}, r"the input 0 has the shape \(3, 2\)"),
    ],
)
def test_wrong_inputs_are_refused(
    arena: Arena, inputs: dict[str, FloatArray], message: str
) -> None:
    graph = build(arena, [(2, 3)], lambda g, t: g.relu(t[0]))
    with pytest.raises(BackendError, match=message):
        graph.run(inputs)


ABORTING: list[tuple[Shapes, Build]] = [
    ([(2, 3), (4, 5)], lambda g, t: g.matmul(t[0], t[1])),
    ([(2, 3)], lambda g, t: g.reshape(t[0], (4, 2))),
    ([(2, 3)], lambda g, t: g.narrow(t[0], 1, 2, 2)),
    ([(2, 3)], lambda g, t: g.narrow(t[0], 1, -1, 2)),
    ([(1, 2, 6)], lambda g, t: g.split_heads(t[0], 0, 5, 2)),
    ([(2, 3), (4,)], lambda g, t: g.add(t[0], t[1])),
    ([(2, 3), (4,)], lambda g, t: g.multiply(t[0], t[1])),
    ([(2, 3), (2, 4)], lambda g, t: g.concat([t[0], t[1]], axis=0)),
    ([(2, 3), (2, 2), (3,)], lambda g, t: g.swiglu(t[0], t[1], t[2], t[2])),
    ([(2, 3), (2, 3), (3,), (2,)], lambda g, t: g.swiglu(t[0], t[1], t[2], t[3])),
    ([(1, 2, 3, 4), (2, 1, 4), (3, 1, 4)], lambda g, t: g.rotate(t[0], t[1], t[2])),
    ([(1, 2, 3, 5), (2, 1, 5), (2, 1, 5)], lambda g, t: g.rotate(t[0], t[1], t[2])),
    ([(2, 3), (3,), (2,)], lambda g, t: g.layer_norm(t[0], t[1], t[2], 1e-5)),
    ([(2, 3)], lambda g, t: g.repeat(t[0], (3, 3))),
    ([(4, 3), (2,)], lambda g, t: g.gather(t[0], t[1])),
]


@pytest.mark.parametrize(("shapes", "operation"), ABORTING)
def test_shapes_that_libggml_would_abort_on_are_refused(
    arena: Arena, shapes: Shapes, operation: Build
) -> None:
    with pytest.raises(BackendError):
        build(arena, shapes, operation)


@pytest.mark.parametrize("capacity", [MAX_TENSORS, 5000])
def test_too_many_operations_are_refused(arena: Arena, capacity: int) -> None:
    builder = GraphBuilder(arena, "long", capacity=capacity)
    x = builder.input("x", (1,))
    for _ in range(capacity - 1):
        x = builder.relu(x)
    builder.output("y", x)
    with pytest.raises(BackendError, match="too many operations"):
        builder.relu(x)
    assert builder.build().run({"x": np.ones(1, np.float32)})["y"].tolist() == [1]


class Poor:
    """libggml on a device that supports no operation."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        if name == "ggml_backend_dev_supports_op":
            return _never
        return getattr(self._handle, name)


def _never(*_arguments: object) -> bool:
    return False


def test_an_operation_that_the_device_lacks_is_refused(arena: Arena) -> None:
    library = arena.backend.library
    poor: Any = Poor(library.handle)
    arena.backend.library = dataclasses.replace(library, handle=poor)
    with pytest.raises(BackendError, match=r"does not support the operation RELU of relu\.2"):
        build(arena, [(2, 3)], lambda g, t: g.relu(t[0]))

"""Weights reach the device exactly, mapped where that is possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_weights import weights_of

from sam3d_gguf.runtime.ggml.backend import Backend, list_devices, open_backend
from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.graph import Arena, FloatArray, GraphBuilder
from sam3d_gguf.runtime.ggml.library import Precision, load_library
from sam3d_gguf.runtime.ggml.store import WeightStore
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import ContractError

ROWS = np.random.default_rng(4).standard_normal((6, 32)).astype(np.float32)
BF16 = (ROWS.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
ROUNDED = (BF16.astype(np.uint32) << np.uint32(16)).view(np.float32)


@pytest.fixture(name="backend")
def _backend() -> Iterator[Backend]:
    with open_backend(load_library(), "cpu", threads=1) as backend:
        yield backend


def weights() -> Weights:
    arrays: Mapping[str, tuple[str, NDArray[Any]]] = {
        "plain.weight": ("F32", ROWS),
        "rounded.weight": ("BF16", BF16),
        "half.weight": ("F16", ROWS.astype(np.float16)),
        "bias": ("BF16", BF16[0]),
        "numbers": ("I32", np.arange(4, dtype=np.int32)),
    }
    return weights_of(arrays, {})


def product(backend: Backend, store: WeightStore, name: str, x: FloatArray) -> FloatArray:
    arena = Arena(backend)
    builder = GraphBuilder(arena, "product")
    builder.output("y", builder.matmul(builder.input("x", x.shape), store[name]))
    graph = builder.build()
    found = graph.run({"x": x})["y"]
    graph.close()
    arena.close()
    return found


def test_strict_weights_are_exact_and_activations_stay_f32(backend: Backend) -> None:
    names = ("plain.weight", "rounded.weight", "half.weight")
    # One value that BF16 and F16 cannot hold: rounding it would give 1.
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = np.float32(1 + 2**-20)
    with WeightStore(backend, weights(), names) as store:
        half = ROWS.astype(np.float16).astype(np.float32)
        for name, rows in zip(names, (ROWS, ROUNDED, half), strict=True):
            expected = rows[:, 0] * x[0, 0]
            np.testing.assert_array_equal(product(backend, store, name, x)[0], expected)
        assert store.mapped_bytes == ROWS.nbytes
        assert store.copied_bytes >= 2 * ROWS.nbytes


def test_fast_matrices_keep_their_type() -> None:
    library = load_library()
    precision: Precision = "fast"
    fast = Backend(library, list_devices(library)[0], precision, None)
    with fast, WeightStore(fast, weights(), ["rounded.weight", "bias"]) as store:
        assert store.mapped_bytes == BF16.nbytes
        found = product(fast, store, "rounded.weight", ROWS)
        np.testing.assert_allclose(found, ROWS @ ROUNDED.T, rtol=0.02, atol=0.1)


def test_derived_arrays_stand_beside_the_files(backend: Backend) -> None:
    derived = {"twice": ROWS * np.float32(2)}
    with WeightStore(backend, weights(), ["plain.weight"], derived) as store:
        assert "twice" in store
        eye = np.eye(32, dtype=np.float32)
        np.testing.assert_array_equal(product(backend, store, "twice", eye), 2 * ROWS.T)


def test_a_missing_tensor_is_refused(backend: Backend) -> None:
    with pytest.raises(ContractError, match=r"the tensor other\.weight is missing"):
        WeightStore(backend, weights(), ["other.weight"])
    with WeightStore(backend, weights(), ["bias"]) as store, pytest.raises(ContractError):
        _ = store["plain.weight"]


class Small(Backend):
    """A device with little memory."""

    def free_memory(self) -> int:
        return 100


def test_weights_that_do_not_fit_are_refused() -> None:
    library = load_library()
    with Small(library, list_devices(library)[0], "strict-f32", None) as small:
        with pytest.raises(BackendError, match="the weights need"):
            WeightStore(small, weights(), ["rounded.weight"])
        small.max_buffer_size = 64
        with pytest.raises(BackendError, match=r"rounded\.weight: the tensor has 768 bytes"):
            WeightStore(small, weights(), ["rounded.weight"])

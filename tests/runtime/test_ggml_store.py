"""Weights reach the device exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_weights import weights_of

from sam3d_gguf.runtime.ggml import store as store_module
from sam3d_gguf.runtime.ggml.backend import Backend, list_devices, open_backend
from sam3d_gguf.runtime.ggml.errors import BackendError
from sam3d_gguf.runtime.ggml.graph import Arena, FloatArray, GraphBuilder
from sam3d_gguf.runtime.ggml.library import Precision, load_library
from sam3d_gguf.runtime.ggml.store import KeptTensors, Tensor, WeightStore
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
        assert 3 * ROWS.nbytes <= store.size < 4 * ROWS.nbytes


def test_fast_matrices_keep_their_type() -> None:
    library = load_library()
    precision: Precision = "fast"
    fast = Backend(library, list_devices(library)[0], precision, None)
    with fast, WeightStore(fast, weights(), ["rounded.weight", "bias"]) as store:
        assert BF16.nbytes <= store.size < 2 * BF16.nbytes
        found = product(fast, store, "rounded.weight", ROWS)
        np.testing.assert_allclose(found, ROWS @ ROUNDED.T, rtol=0.02, atol=0.1)


def values(backend: Backend, tensor: Tensor) -> NDArray[Any]:
    """What a tensor of F32 holds on the device."""
    found = np.empty(tensor.shape, np.float32)
    backend.library.call(
        "ggml_backend_tensor_get", tensor.address, int(found.ctypes.data), 0, found.nbytes
    )
    return found


@pytest.mark.parametrize("fill", ["_fill_memory", "_fill_device"])
@pytest.mark.parametrize(("block", "span"), [(1 << 18, 1 << 23), (64, 1000), (1000, 64), (7, 7)])
def test_every_value_arrives_however_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, fill: str, block: int, span: int
) -> None:
    monkeypatch.setattr(store_module, "_BLOCK_ELEMENTS", block)
    monkeypatch.setattr(store_module, "_SPAN_ELEMENTS", span)
    monkeypatch.setattr(WeightStore, "_fill_memory", vars(WeightStore)[fill])
    bits = np.arange(2**16, dtype=np.uint16)[: 12 * block + 5 if block < 1000 else None]
    wide = np.ascontiguousarray(np.stack([np.zeros_like(bits), bits], axis=-1)).view(np.float32)
    arrays: Mapping[str, tuple[str, NDArray[Any]]] = {
        "bf16": ("BF16", bits),
        "f16": ("F16", bits.view(np.float16)),
        "f32": ("F32", np.arange(len(bits), dtype=np.float32)),
    }
    with (
        open_backend(load_library(), "cpu", threads=3) as backend,
        WeightStore(backend, weights_of(arrays, {}), arrays) as store,
    ):
        found = {name: values(backend, store[name]) for name in arrays}
    assert found["bf16"].tobytes() == wide.tobytes()
    np.testing.assert_array_equal(found["f16"], arrays["f16"][1])
    np.testing.assert_array_equal(found["f32"], arrays["f32"][1])


def test_derived_arrays_stand_beside_the_files(backend: Backend) -> None:
    derived = {"twice": ROWS * np.float32(2)}
    with WeightStore(backend, weights(), ["plain.weight"], derived) as store:
        assert "twice" in store
        eye = np.eye(32, dtype=np.float32)
        np.testing.assert_array_equal(product(backend, store, "twice", eye), 2 * ROWS.T)


def test_a_store_of_nothing_is_empty(backend: Backend) -> None:
    with WeightStore(backend, weights(), []) as store:
        assert store.size == 0
        assert "bias" not in store


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


def test_kept_tensors_hold_what_was_written_last(backend: Backend) -> None:
    with KeptTensors(backend, {"kept": (4, 32)}, "the keys") as kept:
        arena = Arena(backend)
        builder = GraphBuilder(arena, "product")
        builder.output("y", builder.matmul(builder.input("x", (4, 32)), kept["kept"]))
        graph = builder.build()
        x = np.eye(4, 32, dtype=np.float32)
        for values in (ROWS[:4], ROWS[2:]):
            kept.write("kept", values)
            np.testing.assert_array_equal(graph.run({"x": x})["y"], values[:, :4].T)
        with pytest.raises(BackendError, match=r"kept has the shape \(6, 32\)"):
            kept.write("kept", ROWS)
        assert kept.size >= ROWS[:4].nbytes
        graph.close()
        arena.close()


def test_kept_tensors_need_their_memory(backend: Backend) -> None:
    with pytest.raises(BackendError, match="the keys need"):
        KeptTensors(backend, {"kept": (1 << 20, 1 << 20)}, "the keys")

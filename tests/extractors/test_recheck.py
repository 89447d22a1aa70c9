"""The host's own check: a product file is what the source's raw bytes give, or it is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_source import memory_source
from tiny_release import canonical_safetensors

from sam3d_gguf.extractors.hashing import BLOCK_BYTES
from sam3d_gguf.extractors.products import Product, ProductTensor, SourceTensor, plan_products
from sam3d_gguf.extractors.recheck import ProductDigests, digest_product, recheck
from sam3d_gguf.extractors.tensor_ref import StorageRef, TensorRef
from sam3d_gguf.schemas.errors import InputError

Array = np.ndarray[Any, Any]
STORAGE = np.arange(1, 1201, dtype="<u2").tobytes() + np.arange(600, dtype="<f4").tobytes()
HALVES, SINGLES = (StorageRef("0", "data/0", 0, 2400), StorageRef("1", "data/1", 2400, 2400))


def ref(
    name: str, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
) -> TensorRef:
    """A view of the storage that fits its dtype."""
    storage = HALVES if dtype in ("BF16", "F16") else SINGLES
    return TensorRef(name, dtype, shape, strides, storage, offset)


VIEWS = {
    "bf16": ref("bf16", "BF16", (30, 40), (40, 1)),
    "f16": ref("f16", "F16", (30, 40), (40, 1)),
    "f32": ref("f32", "F32", (20, 30), (30, 1)),
    "i32": ref("i32", "I32", (600,), (1,)),
    "transposed": ref("transposed", "F32", (30, 20), (1, 30)),
    "bf16 transposed": ref("bf16 transposed", "BF16", (40, 30), (1, 40)),
    "offset": ref("offset", "F32", (5, 6), (30, 2), 7),
    "expanded": ref("expanded", "BF16", (3, 7), (0, 1), 9),
    "scalar": ref("scalar", "F32", (), (), 11),
    "empty": ref("empty", "F32", (0, 4), (4, 1)),
    "one": ref("one", "BF16", (1,), (1,), 1199),
}


def values(view: TensorRef) -> Array:
    """What a view's values are, by NumPy's own strides; BF16 widened by its definition."""
    kind = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "I32": "<i4"}[view.dtype]
    base = np.frombuffer(STORAGE, kind, offset=view.file_offset)
    strides = [step * base.itemsize for step in view.strides]
    found: Array = np.lib.stride_tricks.as_strided(base, view.shape, strides).copy()
    if view.dtype == "BF16":
        return (found.astype("<u4") << 16).view("<f4")
    return found.astype("<f4") if view.dtype == "F16" else found


def product_of(views: Mapping[str, TensorRef], added: tuple[int, ...] | None = None) -> Product:
    """The product file of some views, with a tensor of zeros where its shape is given."""
    sources = [SourceTensor(v.name, v.dtype, v.shape) for v in views.values()]
    (planned,) = plan_products("mhr", sources)
    tensors = list(planned.tensors)
    if added is not None:
        tensors.append(ProductTensor("zeros", "F32", added, None, "added"))
    return Product(planned.file, tuple(sorted(tensors, key=lambda tensor: tensor.name)))


def file_of(views: Mapping[str, TensorRef], added: tuple[int, ...] | None = None) -> bytes:
    """The right content of that file."""
    tensors = {name: values(view) for name, view in views.items()}
    if added is not None:
        tensors["zeros"] = np.zeros(added, "<f4")
    return canonical_safetensors(tensors)


def checked(
    views: Mapping[str, TensorRef], data: bytes, added: tuple[int, ...] | None = None
) -> ProductDigests:
    """The check of a product file."""
    with memory_source(STORAGE) as source, memory_source(data) as file:
        return recheck(source, views, product_of(views, added), file)


@pytest.mark.parametrize("name", VIEWS)
def test_each_view_alone(name: str) -> None:
    views = {name: VIEWS[name]}
    data = file_of(views)

    found = checked(views, data)

    assert (found.bytes, found.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert found.tensors == {name: hashlib.sha256(values(VIEWS[name]).tobytes()).hexdigest()}


def test_all_views_together() -> None:
    data = file_of(VIEWS, (3, 4))

    found = checked(VIEWS, data, (3, 4))

    assert found.sha256 == hashlib.sha256(data).hexdigest()
    assert found.tensors.keys() == VIEWS.keys() | {"zeros"}


def unwritten(found: ProductDigests, views: Mapping[str, TensorRef]) -> ProductDigests:
    """The digests of the file if nobody writes it: none of tensors that are widened for it."""
    tensors = {
        name: digest
        for name, digest in found.tensors.items()
        if name not in views or views[name].dtype not in ("BF16", "F16")
    }
    assert 0 < len(tensors) < len(found.tensors)
    return ProductDigests(found.sha256, found.bytes, tensors)


def test_a_file_that_is_not_written_has_the_same_digests() -> None:
    product, data = product_of(VIEWS, (3, 4)), file_of(VIEWS, (3, 4))

    with memory_source(STORAGE) as source:
        expected = unwritten(checked(VIEWS, data, (3, 4)), VIEWS)
        assert digest_product(source, VIEWS, product) == expected


def test_tensors_of_several_blocks() -> None:
    count = 5 * BLOCK_BYTES // 8 + 3
    source_data = np.arange(count, dtype="<u4").tobytes()
    storage = StorageRef("0", "data/0", 0, len(source_data))
    views = {
        "f32": TensorRef("f32", "F32", (count,), (1,), storage, 0),
        "bf16": TensorRef("bf16", "BF16", (2 * count,), (1,), storage, 0),
    }
    singles = np.frombuffer(source_data, "<f4")
    halves = (np.frombuffer(source_data, "<u2").astype("<u4") << 16).view("<f4")
    data = bytearray(canonical_safetensors({"f32": singles, "bf16": halves}))
    product = product_of(views)

    with memory_source(source_data) as source:
        with memory_source(bytes(data)) as file:
            found = recheck(source, views, product, file)
        assert found.sha256 == hashlib.sha256(data).hexdigest()
        assert digest_product(source, views, product) == unwritten(found, views)
        data[-5 * BLOCK_BYTES // 4] ^= 1
        with memory_source(bytes(data)) as file, pytest.raises(InputError, match="'f32'"):
            recheck(source, views, product, file)


@given(st.data())
def test_any_flipped_bit_is_found(data: st.DataObject) -> None:
    good = bytearray(file_of(VIEWS, (3, 4)))
    good[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))

    with pytest.raises(InputError):
        checked(VIEWS, bytes(good), (3, 4))


def test_the_tensor_is_named() -> None:
    views = {"f32": VIEWS["f32"], "bf16": VIEWS["bf16"]}
    data = bytearray(file_of(views))
    data[-1] ^= 1

    with pytest.raises(InputError, match="the tensor 'f32' are not those that the source holds"):
        checked(views, bytes(data))


@pytest.mark.parametrize("added", [b"\0", b"\0" * 8, b" " * 8])
def test_a_longer_file_is_refused(added: bytes) -> None:
    with pytest.raises(InputError, match="another header or size"):
        checked(VIEWS, file_of(VIEWS) + added)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, -1])
def test_a_shorter_file_is_refused(size: int) -> None:
    with pytest.raises(InputError, match="another header or size"):
        checked(VIEWS, file_of(VIEWS)[:size])


def test_other_tensors_are_refused() -> None:
    fewer = {name: view for name, view in VIEWS.items() if name != "one"}

    with pytest.raises(InputError, match="another header or size"):
        checked(VIEWS, file_of(fewer))
    with pytest.raises(InputError, match="another header or size"):
        checked(fewer, file_of(VIEWS))


def test_added_zeros_must_be_zeros() -> None:
    data = bytearray(file_of({"f32": VIEWS["f32"]}, (2,)))
    data[-1] = 0x80

    with pytest.raises(InputError, match="the tensor 'zeros'"):
        checked({"f32": VIEWS["f32"]}, bytes(data), (2,))


def test_a_file_without_tensors() -> None:
    data = file_of({})

    assert checked({}, data).sha256 == hashlib.sha256(data).hexdigest()


def test_progress_counts_every_byte() -> None:
    data, done = file_of(VIEWS), list[int]()

    with memory_source(STORAGE) as source, memory_source(data) as file:
        recheck(source, VIEWS, product_of(VIEWS), file, done.append)

    assert sum(done) == len(data)

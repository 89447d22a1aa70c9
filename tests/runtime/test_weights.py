"""Arrays of a file are exact, and of a file that nobody changes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tiny_weights import weights_of

from sam3d_gguf.extractors.files import open_source
from sam3d_gguf.runtime.weights import Weights, WeightTensor
from sam3d_gguf.schemas.errors import ContractError, InputError

PLAIN = np.array([[1.5, -2.25], [3e-40, 1e30]], np.float32)


def weights() -> Weights:
    return weights_of(
        {
            "bits": ("BF16", np.array([0x3FC0, 0xC010, 0x0001], np.uint16)),
            "flags": ("I8", np.array([0, 1, -1], np.int8)),
            "half": ("F16", np.array([0.5, -65504], np.float16)),
            "plain": ("F32", PLAIN),
            "whole": ("I32", np.array([7, -1], np.int32)),
        },
        {"sam3d.body.size": 7},
    )


def test_arrays_are_exact() -> None:
    opened = weights()
    np.testing.assert_array_equal(opened.array("plain"), PLAIN)
    expected = np.array([1.5, -2.25, 2.0**-133], np.float32)
    np.testing.assert_array_equal(opened.array("bits"), expected)
    np.testing.assert_array_equal(opened.array("half"), np.array([0.5, -65504], np.float32))
    np.testing.assert_array_equal(opened.array("whole"), np.array([7, -1], np.int32))
    np.testing.assert_array_equal(opened.array("flags"), np.array([0, 1, -1], np.int32))
    types = {name: opened.array(name).dtype for name in opened.tensors}
    floats, integers = np.dtype(np.float32), np.dtype(np.int32)
    assert types == {
        "bits": floats,
        "flags": integers,
        "half": floats,
        "plain": floats,
        "whole": integers,
    }


def test_a_missing_tensor_is_refused() -> None:
    opened = weights()
    assert "plain" in opened
    assert "other" not in opened
    with pytest.raises(ContractError, match="the tensor other is missing"):
        opened.array("other")


@pytest.mark.parametrize("size", [96, 96 + 159_999])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    values = np.arange(40_000, dtype=np.float32)
    path = tmp_path / "values"
    path.write_bytes(bytes(96) + values.tobytes())
    tensor = WeightTensor("values", values.shape, "F32", 96)
    with Weights({}, {"values": tensor}, open_source(path)) as opened:
        np.testing.assert_array_equal(opened.array("values"), values)
        os.truncate(path, size)
        with pytest.raises(InputError, match=f"ends at byte {size}, but had 160096 bytes"):
            opened.array("values")


def test_a_file_that_is_written_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "values"
    path.write_bytes(bytes(64))
    with Weights(
        {}, {"values": WeightTensor("values", (4,), "F32", 0)}, open_source(path)
    ) as opened:
        assert not opened.array("values").any()
        path.write_bytes(bytes(65))
        with pytest.raises(InputError, match="was changed while it was read"):
            opened.array("values")

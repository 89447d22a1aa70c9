"""A GGUF is opened through the strict reader only, and its arrays are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sam3d_gguf.convert.gguf_format import (
    GgmlType,
    GgufTensorSpec,
    ValueType,
    array,
    string,
    uint32,
)
from sam3d_gguf.convert.gguf_writer import GgufLayout
from sam3d_gguf.runtime.weights import open_weights
from sam3d_gguf.schemas.errors import ContractError, InputError

PLAIN = np.array([[1.5, -2.25], [3e-40, 1e30]], np.float32)
BF16 = np.array([0x3FC0, 0xC010, 0x0001], np.uint16)
Data = dict[str, tuple[GgmlType, NDArray[Any]]]
DATA: Data = {
    "bits": (GgmlType.BF16, BF16),
    "flags": (GgmlType.I8, np.array([0, 1, -1], np.int8)),
    "half": (GgmlType.F16, np.array([0.5, -65504], np.float16)),
    "plain": (GgmlType.F32, PLAIN),
    "whole": (GgmlType.I32, np.array([7, -1], np.int32)),
}


def write(path: Path, data: Data = DATA) -> Path:
    metadata = {
        "general.architecture": string("sam3d.body"),
        "sam3d.body.size": uint32(7),
        "sam3d.names": array(ValueType.STRING, ["a", "b"]),
    }
    specs = [GgufTensorSpec(name, values.shape, kind) for name, (kind, values) in data.items()]
    layout = GgufLayout.plan(metadata, specs)
    content = bytearray(layout.size)
    content[: len(layout.header)] = layout.header
    for name, tensor in layout.tensors.items():
        content[tensor.offset : tensor.offset + tensor.nbytes] = data[name][1].tobytes()
    path.write_bytes(content)
    return path


def test_tensors_and_metadata_are_exact(tmp_path: Path) -> None:
    weights = open_weights(write(tmp_path / "body.gguf"), "sam3d.body")
    np.testing.assert_array_equal(weights.array("plain"), PLAIN)
    expected = np.array([1.5, -2.25, 2.0**-133], np.float32)
    np.testing.assert_array_equal(weights.array("bits"), expected)
    np.testing.assert_array_equal(weights.array("half"), np.array([0.5, -65504], np.float32))
    np.testing.assert_array_equal(weights.array("whole"), np.array([7, -1], np.int32))
    np.testing.assert_array_equal(weights.array("flags"), np.array([0, 1, -1], np.int32))
    assert weights.array("plain").dtype == weights.array("bits").dtype == np.float32
    assert weights.metadata["sam3d.body.size"] == 7
    assert weights.metadata["sam3d.names"] == ["a", "b"]
    assert "plain" in weights
    assert "other" not in weights
    assert not weights.raw("plain").flags.writeable


def test_a_released_tensor_can_be_read_again(tmp_path: Path) -> None:
    large = np.arange(40_000, dtype=np.float32)
    path = write(tmp_path / "body.gguf", {"large": (GgmlType.F32, large)})
    weights = open_weights(path, "sam3d.body")
    before = weights.array("large").copy()
    weights.release("large")
    np.testing.assert_array_equal(weights.array("large"), before)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"'sam3d\.body'; expected 'sam3d\.mhr\.lod1'"):
        open_weights(write(tmp_path / "body.gguf"), "sam3d.mhr.lod1")


def test_a_type_without_arithmetic_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "body.gguf", {"long": (GgmlType.I64, np.arange(3))})
    with pytest.raises(ContractError, match="the tensor long is of type I64"):
        open_weights(path, "sam3d.body")


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    weights = open_weights(write(tmp_path / "body.gguf"), "sam3d.body")
    with pytest.raises(ContractError, match="the tensor other is missing"):
        weights.array("other")


def test_a_damaged_file_never_gets_mapped(tmp_path: Path) -> None:
    path = write(tmp_path / "body.gguf")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError):
        open_weights(path, "sam3d.body")


def test_a_link_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(write(tmp_path / "body.gguf"))
    with pytest.raises(InputError):
        open_weights(link, "sam3d.body")

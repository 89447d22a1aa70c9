"""The committed facts about the official files: names, dtypes, shapes, hashes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sam3d_gguf.convert.contract import TensorSpec

FIXTURES = Path(__file__).parent / "fixtures"
TINY = FIXTURES / "tiny-body-a"
_FACTS = FIXTURES / "facts"


def rows(name: str) -> list[list[str]]:
    """Returns the space-separated fields of every line of a facts file."""
    return [line.split(" ") for line in (_FACTS / name).read_text().splitlines()]


def shape(text: str) -> tuple[int, ...]:
    """Returns the shape that a facts file writes as 3x4."""
    return tuple(int(size) for size in text.split("x"))


def body_inventory() -> dict[str, TensorSpec]:
    """Returns dtype and shape of the 1,127 tensors of the official Body checkpoint."""
    return {
        name: TensorSpec(dtype, shape(sizes)) for name, dtype, sizes in rows("body-inventory.txt")
    }


def mhr_asset() -> dict[str, TensorSpec]:
    """Returns dtype and shape of the known tensors of the official MHR asset."""
    return {
        name: TensorSpec(dtype, shape(sizes)) for name, dtype, sizes, _ in rows("mhr-asset.txt")
    }


def mhr_skeleton() -> dict[str, Any]:
    """Returns names, parents, prefix sizes and hashes of the official joint hierarchy."""
    skeleton: dict[str, Any] = json.loads((_FACTS / "mhr-skeleton.json").read_text())
    return skeleton


def native_metadata() -> dict[str, dict[str, str | int]]:
    """Returns the metadata of the native components at the official values, by component."""
    metadata: dict[str, dict[str, str | int]] = json.loads(
        (_FACTS / "native-metadata.json").read_text()
    )
    return metadata


def tiny(name: str) -> dict[str, TensorSpec]:
    """Returns dtype and shape of what PyTorch loads from a file of the tiny fixture."""
    expected = json.loads((TINY / "expected-tensors.json").read_text())[name]
    return {n: TensorSpec(t["dtype"], tuple(t["shape"])) for n, t in expected.items()}

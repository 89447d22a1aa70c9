"""A component's tensors in the order of their appearance, and their names in a capture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sam3d_gguf.runtime.objects.components.inputs import Array

Captured = dict[str, Array]
"""Tensors by stage, in the order of appearance."""


class Recorder:
    """Receives the stages of a network as `Taps`.

    Attributes:
        found: by name, in the order of the graph.
    """

    def __init__(self) -> None:
        self.found: Captured = {}

    def __call__(self, name: str, array: NDArray[np.generic], /) -> None:
        self.found[name] = array

    def __getitem__(self, name: str) -> Array:
        return self.found[name]


def prefixed(prefix: str, arrays: Mapping[str, Array]) -> Captured:
    """The arrays in the order of their names, each of which gets a prefix and a dot."""
    return {f"{prefix}.{name}": arrays[name] for name in sorted(arrays)}


def without_prefix(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays whose names begin with a prefix and a dot, without these."""
    start = f"{prefix}."
    return {n.removeprefix(start): array for n, array in arrays.items() if n.startswith(start)}


def decimal(value: float) -> str:
    """A float32 in the name of a stage: 437p5 for 437.5."""
    return np.format_float_positional(np.float32(value), trim="-").replace(".", "p")


def numbered(captured: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors as a capture stores them: `NNN.stage`.

    A tensor with numbers that are not finite becomes two: a uint8 `.nonfinite_mask`, 1 where they
    are, and `.nonfinite_to_0`.
    """
    parts: list[tuple[str, Any]] = []
    for name, array in captured.items():
        finite = np.isfinite(array)
        if finite.all():
            parts.append((name, array))
        else:
            parts.append((f"{name}.nonfinite_mask", (~finite).astype(np.uint8)))
            zeroed = np.where(finite, array, np.zeros((), array.dtype))
            parts.append((f"{name}.nonfinite_to_0", zeroed))
    return {f"{i:03d}.{name}": np.ascontiguousarray(array) for i, (name, array) in enumerate(parts)}

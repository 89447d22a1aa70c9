"""The tiny SAM 3D Objects' components: what the original took, what it computed, and the limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from objects_parity import fixture, read

from sam3d_gguf.runtime.parity import Rules, compare_arrays, load_rules

Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Component:
    """The fixture files of one component."""

    inputs: Tensors
    expected: Tensors
    rules: Rules

    @classmethod
    def load(cls, name: str) -> Component:
        """The component of that name."""
        return cls(
            read(f"inputs-{name}"),
            read(f"expected-{name}"),
            load_rules(fixture(f"rules-{name}.json")),
        )

    def failures(self, found: Tensors, *, prefix: str = "") -> list[str]:
        """What is wrong with tensors that should be the expected ones whose name has `prefix`."""
        wanted = {n: array for n, array in self.expected.items() if n[4:].startswith(prefix)}
        assert wanted
        return self._judge(wanted, found)

    def failures_of(self, found: Tensors) -> list[str]:
        """What is wrong with some of the expected tensors."""
        return self._judge({name: self.expected[name] for name in found}, found)

    def _judge(self, wanted: Tensors, found: Tensors) -> list[str]:
        verdicts = compare_arrays(wanted, found, self.rules)
        return [f"{verdict.name}: {verdict.reason}" for verdict in verdicts if not verdict.passed]


def finite_parts(name: str, array: NDArray[np.float32]) -> Tensors:
    """A tensor with numbers that are not finite, as the fixtures store it; `name` has its number."""
    number, rest = int(name[:3]), name[4:]
    finite = np.isfinite(array)
    return {
        f"{number:03d}.{rest}.nonfinite_mask": (~finite).astype(np.uint8),
        f"{number + 1:03d}.{rest}.nonfinite_to_0": np.where(finite, array, np.float32(0)),
    }

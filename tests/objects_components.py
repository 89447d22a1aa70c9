"""The tiny SAM 3D Objects' components: what the original took, what it computed, and the limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from objects_facts import TINY, TINY_MOGE

from sam3d_gguf.runtime.parity import Rules, compare_arrays, load_rules
from sam3d_gguf.runtime.tensor_files import TensorFile

Tensors = dict[str, NDArray[Any]]


def fixture(name: str) -> Path:
    """A file of the tiny model, or of the depth model."""
    return next(folder / name for folder in (TINY, TINY_MOGE) if (folder / name).exists())


def read(path: Path) -> Tensors:
    """All tensors of a file."""
    with TensorFile(path) as file:
        return {tensor: file.read(tensor) for tensor in file.tensors}


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
            read(fixture(f"inputs-{name}.safetensors")),
            read(fixture(f"expected-{name}.safetensors")),
            load_rules(fixture(f"rules-{name}.json")),
        )

    def failures(self, found: Tensors, *, left_out: str = "$^") -> list[str]:
        """What is wrong with tensors that should be the expected ones.

        Args:
            found: by name.
            left_out: pattern of the expected ones, without their numbers, that are not asked for.
        """
        wanted = {
            name: array for name, array in self.expected.items() if not re.match(left_out, name[4:])
        }
        assert wanted
        unknown = [f"{name}: not expected" for name in found if name not in wanted]
        return unknown + self._judge(wanted, found)

    def failures_of(self, found: Tensors) -> list[str]:
        """What is wrong with some of the expected tensors."""
        return self._judge({name: self.expected[name] for name in found}, found)

    def _judge(self, wanted: Tensors, found: Tensors) -> list[str]:
        verdicts = compare_arrays(wanted, found, self.rules)
        return [f"{verdict.name}: {verdict.reason}" for verdict in verdicts if not verdict.passed]

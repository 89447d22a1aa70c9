"""Components of the tiny SAM 3D Objects, compared with their fixtures under the fixtures' rules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from objects_facts import TINY, TINY_MOGE

from sam3d_gguf.runtime.parity import compare_arrays, load_rules
from sam3d_gguf.runtime.tensor_files import TensorFile

Array = NDArray[Any]
Arrays = dict[str, Array]
_NUMBER = re.compile(r"^[0-9]{3}\.")


def fixture(name: str) -> Path:
    """A file of the tiny model, or of the depth model."""
    return next(folder / name for folder in (TINY, TINY_MOGE) if (folder / name).exists())


def read(name: str) -> Arrays:
    """All tensors of a fixture file."""
    with TensorFile(fixture(f"{name}.safetensors")) as file:
        return {tensor: file.read(tensor) for tensor in file.tensors}


def inputs_of(component: str) -> Arrays:
    """What a component is given."""
    return read(f"inputs-{component}")


class Captured:
    """Receives a component's stages as `Taps`."""

    def __init__(self) -> None:
        self.found: Arrays = {}

    def __call__(self, name: str, array: Array, /) -> None:
        assert name not in self.found
        self.found[name] = array

    def failures(self, component: str, *, left_out: str = "$^") -> list[str]:
        """What the fixture holds and is missing or breaks its rule.

        Args:
            left_out: pattern of the stages that are not compared here.
        """
        expected = {
            name: array
            for name, array in read(f"expected-{component}").items()
            if not re.match(left_out, _NUMBER.sub("", name))
        }
        numbered = {_NUMBER.sub("", name): name for name in expected}
        found = {
            numbered[name]: np.ascontiguousarray(array)
            for name, array in self.found.items()
            if name in numbered
        }
        verdicts = compare_arrays(expected, found, load_rules(fixture(f"rules-{component}.json")))
        assert len(verdicts) == len(expected) > 0
        return [f"{verdict.name}: {verdict.reason}" for verdict in verdicts if not verdict.passed]

"""The kept inputs of every fuzz target, once more.

New targets need nothing here: a file fuzz_NAME.py with `one_input`, and its corpus in corpus/NAME.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
TARGETS = sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.py"))


def load(target: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fuzz_{target}", HERE / f"fuzz_{target}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("target", TARGETS)
def test_kept_inputs_pass(target: str) -> None:
    one_input = load(target).one_input
    inputs = sorted((HERE / "corpus" / target).iterdir())

    assert inputs, "the target has no corpus"
    for path in inputs:
        one_input(path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_damage_to_kept_inputs_passes(target: str) -> None:
    """Each input cut in half and with one byte changed: quick, but never the same as kept."""
    one_input = load(target).one_input
    for path in sorted((HERE / "corpus" / target).iterdir()):
        data = bytearray(path.read_bytes())
        one_input(bytes(data[: len(data) // 2]))
        if data:
            data[len(data) // 3] ^= 0x41
            one_input(bytes(data))

"""Typed values of the metadata of Objects' parts."""

from __future__ import annotations

from typing import cast

import numpy as np

from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import ContractError


def number(weights: Weights, key: str) -> float:
    """The number at `key`, after the file's architecture and a dot.

    A float32 is given as the shortest decimal that is stored as it, so that 1.2 is Python's 1.2.

    Raises:
        ContractError: there is none.
    """
    return _as_number(weights, key, _value(weights, key))


def integer(weights: Weights, key: str) -> int:
    """The integer at `key`.

    Raises:
        ContractError: there is none.
    """
    value = _value(weights, key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _missing(weights, key, "an integer")
    return value


def numbers(weights: Weights, key: str, count: int) -> tuple[float, ...]:
    """The `count` numbers at `key`.

    Raises:
        ContractError: there are none, or another number of them.
    """
    value = _value(weights, key)
    items = cast("list[object]", value) if isinstance(value, list) else []
    if len(items) != count:
        raise _missing(weights, key, f"{count} numbers")
    return tuple(_as_number(weights, key, item) for item in items)


def _value(weights: Weights, key: str) -> object:
    return weights.metadata.get(_full(weights, key))


def _full(weights: Weights, key: str) -> str:
    return f"{weights.metadata.get('general.architecture')}.{key}"


def _as_number(weights: Weights, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _missing(weights, key, "a number")
    return float(str(np.float32(value))) if isinstance(value, float) else float(value)


def _missing(weights: Weights, key: str, expected: str) -> ContractError:
    return ContractError(
        f"the metadata key {_full(weights, key)} is missing or of another kind",
        where=str(weights.path),
        expected=expected,
        action="Convert the model again with this version.",
    )

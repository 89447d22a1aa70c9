"""What a part of SAM 3D Objects says of itself beside its tensors."""

from __future__ import annotations

from typing import Any

from sam3d_gguf.runtime.objects.metadata import integer, number, numbers
from sam3d_gguf.runtime.weights import Weights
from sam3d_gguf.schemas.errors import ContractError


class Settings:
    """The metadata of a part's GGUF, without what all keys begin with."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._prefix = str(weights.metadata.get("general.architecture"))

    def __contains__(self, key: object) -> bool:
        return f"{self._prefix}.{key}" in self._weights.metadata

    def integer(self, key: str) -> int:
        """A whole number."""
        return integer(self._weights, key)

    def real(self, key: str) -> float:
        """A number."""
        return number(self._weights, key)

    def flag(self, key: str) -> bool:
        """A truth value."""
        return bool(self._value(key))

    def reals(self, key: str, count: int) -> tuple[float, ...]:
        """So many numbers."""
        return numbers(self._weights, key, count)

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        return [str(item) for item in self._value(key)]

    def _value(self, key: str) -> Any:
        name = f"{self._prefix}.{key}"
        value: Any = self._weights.metadata.get(name)
        if value is None:
            raise ContractError(
                f"the key {name} is missing",
                where=str(self._weights.path),
                action="Convert the model again with this version.",
            )
        return value

"""Measure the difference of two tensors in float64, block by block."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(slots=True)
class Difference:
    """Running totals over the blocks of one tensor pair.

    Attributes:
        max_abs: largest absolute difference so far.
        worst: flat index of it, with the two values there.
        square_difference, square_reference: sums of squares, of (sin, cos) pairs when `euler`.
        equal: whether all bytes were equal.
        bad_reference, bad_candidate: flat index of the first non-finite value.
        size: elements seen.
    """

    euler: bool = False
    max_abs: float = 0.0
    worst: int = 0
    worst_values: tuple[float, float] = (0.0, 0.0)
    square_difference: float = 0.0
    square_reference: float = 0.0
    equal: bool = True
    bad_reference: int | None = None
    bad_candidate: int | None = None
    size: int = 0

    @property
    def reference_norm(self) -> float:
        """L2 norm of the reference."""
        return math.sqrt(self.square_reference)

    @property
    def relative_l2(self) -> float:
        """L2 norm of the difference over that of the reference; infinite over a zero one."""
        if self.square_difference == 0.0:
            return 0.0
        norm = self.reference_norm
        return math.sqrt(self.square_difference) / norm if norm > 0.0 else math.inf

    def add(self, reference: Array, candidate: Array) -> None:
        """Take in one pair of flat blocks of the same length and type."""
        self.equal = self.equal and reference.tobytes() == candidate.tobytes()
        left, right = reference.astype(np.float64), candidate.astype(np.float64)
        self.bad_reference = self._first_bad(left, self.bad_reference)
        self.bad_candidate = self._first_bad(right, self.bad_candidate)
        if left.size and self.bad_reference is None and self.bad_candidate is None:
            with np.errstate(over="ignore"):
                self._accumulate(left, right, _gap(reference, candidate, left, right))
        self.size += left.size

    def _first_bad(self, block: NDArray[np.float64], found: int | None) -> int | None:
        if found is not None or bool(np.isfinite(block).all()):
            return found
        return self.size + int(np.argmin(np.isfinite(block)))

    def _accumulate(
        self,
        left: NDArray[np.float64],
        right: NDArray[np.float64],
        gap: NDArray[np.float64],
    ) -> None:
        index = int(np.argmax(gap))
        if self.size == 0 or gap[index] > self.max_abs:
            self.max_abs = float(gap[index])
            self.worst = self.size + index
            self.worst_values = (float(left[index]), float(right[index]))
        if self.euler:
            left = np.concatenate([np.sin(left), np.cos(left)])
            right = np.concatenate([np.sin(right), np.cos(right)])
            gap = np.abs(right - left)
        self.square_difference += float(np.dot(gap, gap))
        self.square_reference += float(np.dot(left, left))


def _gap(
    reference: Array, candidate: Array, left: NDArray[np.float64], right: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The absolute differences; those of large integers would vanish in float64."""
    if reference.dtype.kind != "i":
        return np.abs(right - left)
    low, high = np.minimum(reference, candidate), np.maximum(reference, candidate)
    return np.subtract(high.astype(np.uint64), low.astype(np.uint64)).astype(np.float64)


def measure(pairs: Iterable[tuple[Array, Array]], *, euler: bool = False) -> Difference:
    """The difference over all block pairs (reference, candidate)."""
    found = Difference(euler=euler)
    for reference, candidate in pairs:
        found.add(reference, candidate)
    return found

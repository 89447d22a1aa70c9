"""Value rules: what the numbers of a tensor must be, checked block by block.

A tensor of hundreds of megabytes never sits in memory whole: its blocks, in C order, are fed to
the checkers of its rules.

>>> (checker,) = make_checkers([IndexRange(0, 9)], (2, 3), "faces")
>>> checker.feed(np.array([0, 1, 2, 3, 4, 10]))
Traceback (most recent call last):
...
sam3d_gguf.schemas.errors.ContractError: faces: the value 10 at [1, 2] is out of range; expected \
0 to 9

Blocks are 1-D arrays; BF16 comes as uint16, BOOL as uint8 or bool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from sam3d_gguf.schemas.errors import ContractError

Block: TypeAlias = npt.NDArray[Any]


class Checker(Protocol):
    """The progress of one rule over one tensor."""

    def feed(self, block: Block) -> None:
        """Checks the next elements in C order; raises ContractError at the first violation."""

    def finish(self) -> None:
        """Checks what only the whole tensor can show; raises ContractError."""


class Rule(Protocol):
    """A rule with its numbers filled in."""

    def checker(self, name: str, shape: tuple[int, ...]) -> Checker:
        """Returns a checker for the tensor of that name and shape."""
        ...


def make_checkers(rules: Iterable[Rule], shape: tuple[int, ...], name: str) -> list[Checker]:
    """Returns one checker per rule for a tensor; name is what errors call it."""
    return [rule.checker(name, shape) for rule in rules]


@dataclass(frozen=True, slots=True)
class Finite:
    """No element is NaN or infinite."""

    def checker(self, name: str, shape: tuple[int, ...]) -> Checker:
        return _Elementwise(name, shape, _find_non_finite, "is not finite", "a finite value")


@dataclass(frozen=True, slots=True)
class IndexRange:
    """Every element is an integer from minimum to maximum, both included."""

    minimum: int
    maximum: int

    def checker(self, name: str, shape: tuple[int, ...]) -> Checker:
        return _range_checker(name, shape, self.minimum, self.maximum)


@dataclass(frozen=True, slots=True)
class Interval:
    """Every element lies between low and high, both included."""

    low: float
    high: float

    def checker(self, name: str, shape: tuple[int, ...]) -> Checker:
        return _range_checker(name, shape, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Positive:
    """Every element is greater than zero."""

    def checker(self, name: str, shape: tuple[int, ...]) -> Checker:
        return _Elementwise(name, shape, _find_not_positive, "is not positive", "more than 0")


@dataclass(frozen=True, slots=True)
class Zero:
    """Every element is zero, with all its bits."""

    def checker(self, name: str, shape: tuple[int, ...]) -> Checker:
        return _Elementwise(name, shape, _find_not_zero, "is not zero", "0")


@dataclass(frozen=True, slots=True)
class Permutation:
    """The elements are the integers from first to last, each once, in any order."""

    first: int
    last: int

    def checker(self, name: str, shape: tuple[int, ...]) -> Checker:
        return _Whole(name, shape, self._check)

    def _check(self, values: Block, name: str, _shape: tuple[int, ...]) -> None:
        wanted = np.arange(self.first, self.last + 1)
        if not np.array_equal(np.sort(values), wanted):
            raise ContractError(
                "the values are no permutation",
                where=name,
                expected=f"each of {self.first} to {self.last} once",
            )


@dataclass(frozen=True, slots=True)
class QkvBiasMask:
    """All zero, or 1 in the query third, 0 in the key third and 1 in the value third."""

    def checker(self, name: str, shape: tuple[int, ...]) -> Checker:
        return _Whole(name, shape, _check_bias_mask)


@dataclass(frozen=True, slots=True)
class SortedUniqueCoo:
    """[2, n] indices of a sparse rows x columns matrix: in range, row-major, strictly ascending."""

    rows: int
    columns: int

    def checker(self, name: str, shape: tuple[int, ...]) -> Checker:
        return _Whole(name, shape, self._check)

    def _check(self, values: Block, name: str, shape: tuple[int, ...]) -> None:
        row, column = values.reshape(shape).astype(np.int64)
        for axis, size, indices in ((0, self.rows, row), (1, self.columns, column)):
            _range_checker(f"{name}[{axis}]", indices.shape, 0, size - 1).feed(indices)
        linear = row * self.columns + column
        steps = np.flatnonzero(np.diff(linear) <= 0)
        if steps.size:
            at = int(steps[0]) + 1
            raise ContractError(
                f"the entry {at} does not come after the one before it",
                where=name,
                expected="unique indices sorted row by row",
            )


@dataclass(frozen=True, slots=True)
class Parents:
    """A joint hierarchy: the first joint has no parent (-1), every other an earlier one."""

    def checker(self, name: str, shape: tuple[int, ...]) -> Checker:
        return _Whole(name, shape, _check_parents)


def prefix_schedule(parents: Block) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """Rebuilds MHR's prefix schedule from the joint hierarchy.

    Group `level` lists, in joint order, every joint whose depth i (root 0) has bit `level` set,
    with the ancestor at position ((i >> level) << level) - 1 of its chain from the root.

    Args:
        parents: [J] parent of each joint, -1 for the root, parents before children.

    Returns:
        The [2, N] indices (joints, then ancestors), all groups after one another, and the size of
        each group.
    """
    chains: list[list[int]] = []
    for joint, parent in enumerate(parents.tolist()):
        chains.append([*(chains[parent] if parent >= 0 else ()), joint])
    groups: list[list[tuple[int, int]]] = []
    for level in range(max(len(chain) - 1 for chain in chains).bit_length()):
        deep = (c for c in chains if (len(c) - 1) >> level & 1)
        groups.append([(c[-1], c[((len(c) - 1) >> level << level) - 1]) for c in deep])
    pairs = [pair for group in groups for pair in group]
    indices = np.array(pairs, np.int64).reshape(-1, 2).T
    return np.ascontiguousarray(indices), tuple(len(group) for group in groups)


def check_prefix_schedule(parents: Block, prefix: Block, *, name: str) -> tuple[int, ...]:
    """Compares a [2, N] prefix schedule with the one that the hierarchy gives.

    Returns:
        The size of each group.

    Raises:
        ContractError: they differ; parents must have passed the `Parents` rule.
    """
    expected, sizes = prefix_schedule(parents)
    if not np.array_equal(expected, prefix):
        text = ",".join(map(str, sizes))
        raise ContractError(
            "the prefix schedule is not the one that the joint parents give",
            where=name,
            expected=f"{expected.shape[1]} compositions in groups of {text}",
        )
    return sizes


class BoundTensorLike(Protocol):
    """What `ValueRules` needs of a bound tensor."""

    @property
    def source_name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stored_shape(self) -> tuple[int, ...]: ...
    @property
    def rules(self) -> tuple[Rule, ...]: ...


@dataclass(frozen=True, slots=True)
class PrefixRelation:
    """The cross-tensor rule that `prefix` is the schedule of `parents`, by source names."""

    prefix: str
    parents: str


@dataclass(slots=True)
class ValueRules:
    """All value rules of one model, those between tensors included.

    Attributes:
        relations: the cross-tensor rules.
        prefix_sizes: group sizes of each prefix schedule that `finish` has checked, by its name.
    """

    relations: Sequence[PrefixRelation]
    prefix_sizes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    _kept: dict[str, Block] = field(default_factory=dict[str, Block])
    _called: dict[str, str] = field(default_factory=dict[str, str])

    def checkers(self, tensor: BoundTensorLike, name: str | None = None) -> list[Checker]:
        """Returns the checkers for a tensor; all its blocks must go through each of them.

        Args:
            tensor: the tensor and its rules.
            name: what errors call it in a GGUF, whose order its elements then have; by default
                it is fed as the source has it.
        """
        source = tensor.source_name
        called = self._called[source] = name or source
        shape = tensor.shape if name is None else tensor.stored_shape
        checkers = make_checkers(tensor.rules, shape, called)
        if any(source in (r.prefix, r.parents) for r in self.relations):

            def keep(values: Block, _name: str, shape: tuple[int, ...]) -> None:
                self._kept[source] = values.reshape(shape).copy()

            checkers.append(_Whole(called, tensor.shape, keep))
        return checkers

    def finish(self) -> None:
        """Checks the rules between tensors.

        Raises:
            ContractError: one does not hold, or a tensor it needs was not fed.
        """
        for relation in self.relations:
            missing = {relation.prefix, relation.parents} - self._kept.keys()
            if missing:
                raise ContractError("the tensor was not checked", where=min(missing))
            self.prefix_sizes[relation.prefix] = check_prefix_schedule(
                self._kept[relation.parents],
                self._kept[relation.prefix],
                name=self._called[relation.prefix],
            )


def as_float(block: Block) -> Block:
    """Returns a block with BF16 (uint16) widened exactly to float32; others as they are."""
    if block.dtype != np.uint16:
        return block
    return (block.astype(np.uint32) << np.uint32(16)).view(np.float32)


class _Find(Protocol):
    def __call__(self, block: Block, /) -> int | None:
        """Returns the position of the first offender in a block."""


class _Check(Protocol):
    def __call__(self, values: Block, name: str, shape: tuple[int, ...], /) -> None:
        """Checks all values of a tensor, flat in C order."""


@dataclass(slots=True)
class _Elementwise:
    """Applies a test of single elements and says which one fails."""

    name: str
    shape: tuple[int, ...]
    find: _Find
    fault: str
    expected: str
    fed: int = 0

    def feed(self, block: Block) -> None:
        at = self.find(block) if block.size else None
        if at is not None:
            index = [int(i) for i in np.unravel_index(self.fed + at, self.shape)]
            value = as_float(block[at : at + 1])[0]
            raise ContractError(
                f"the value {value} at {index} {self.fault}",
                where=self.name,
                expected=self.expected,
            )
        self.fed += block.size

    def finish(self) -> None:
        _require_all(self.name, self.shape, self.fed)


@dataclass(slots=True)
class _Whole:
    """Keeps a small tensor until it is complete, then checks it."""

    name: str
    shape: tuple[int, ...]
    check: _Check
    blocks: list[Block] = field(default_factory=list[Block])

    def feed(self, block: Block) -> None:
        self.blocks.append(block.copy())

    def finish(self) -> None:
        _require_all(self.name, self.shape, sum(block.size for block in self.blocks))
        self.check(np.concatenate(self.blocks), self.name, self.shape)
        self.blocks.clear()


def _require_all(name: str, shape: tuple[int, ...], fed: int) -> None:
    if fed != math.prod(shape):
        raise ContractError(
            f"{fed} elements were checked", where=name, expected=f"{math.prod(shape)}"
        )


# A float is not finite when its exponent bits are all ones. Then its bit pattern, read as a signed
# integer (sign bit 0) or as an unsigned one (sign bit 1), is at least the pattern of infinity, and
# no finite float reaches it: two maxima decide, without a temporary array.
_INFINITY: Mapping[np.dtype[Any], tuple[type[np.signedinteger[Any]], int]] = {
    np.dtype(np.uint16): (np.int16, 0x7F80),
    np.dtype(np.float16): (np.int16, 0x7C00),
    np.dtype(np.float32): (np.int32, 0x7F800000),
    np.dtype(np.float64): (np.int64, 0x7FF0000000000000),
}
_CHUNK_BYTES = 1 << 19  # both passes over a chunk must find it in the cache


def all_finite(block: Block) -> bool:
    """Says whether a 1-D block of BF16 (as uint16), F16, F32 or F64 holds only finite values."""
    signed, infinity = _INFINITY[block.dtype]
    bits = block.view(signed)
    unsigned_bits = bits.view(f"u{bits.itemsize}")
    negative_infinity = infinity + (1 << (8 * bits.itemsize - 1))
    step = _CHUNK_BYTES // bits.itemsize
    return all(
        bits[i : i + step].max() < infinity
        and unsigned_bits[i : i + step].max() < negative_infinity
        for i in range(0, bits.size, step)
    )


def _find_non_finite(block: Block) -> int | None:
    if all_finite(block):
        return None
    return int(np.argmin(np.isfinite(as_float(block))))


def _range_checker(name: str, shape: tuple[int, ...], low: float, high: float) -> _Elementwise:
    def find(block: Block) -> int | None:
        values = as_float(block)
        if values.min() >= low and values.max() <= high:
            return None
        return int(np.argmin((values >= low) & (values <= high)))

    return _Elementwise(name, shape, find, "is out of range", f"{low} to {high}")


def _find_not_positive(block: Block) -> int | None:
    values = as_float(block)
    if values.min() > 0:
        return None
    return int(np.argmin(values > 0))


def _find_not_zero(block: Block) -> int | None:
    nonzero = block.view(np.uint8)
    return int(np.argmax(nonzero != 0)) // block.itemsize if nonzero.any() else None


def _check_bias_mask(values: Block, name: str, _shape: tuple[int, ...]) -> None:
    mask = as_float(values)
    query, key, value = np.split(mask, 3)
    masked = bool((query == 1).all() and (key == 0).all() and (value == 1).all())
    if not masked and bool(mask.any()):
        raise ContractError(
            "the bias mask is neither all zero nor query 1, key 0, value 1", where=name
        )


def _check_parents(values: Block, name: str, _shape: tuple[int, ...]) -> None:
    joints = np.arange(values.size)
    right = (values >= 0) & (values < joints)
    right[:1] = values[:1] == -1
    if not right.all():
        at = int(np.argmin(right))
        raise ContractError(
            f"the parent of joint {at} is {values[at]}",
            where=name,
            expected="-1 for joint 0, an earlier joint for every other",
        )

"""Binding: the numbers of a contract's dimensions, found in a source and checked against it.

A dimension is a constant, a value of the configuration or of a file's metadata, the number of
repeated blocks, the size that most of the axes declared as this dimension have (so that one
misshapen tensor is named as such, and not the other hundred), or an expression of other dimensions.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from sam3d_gguf.convert.contract_types import (
    ContractData,
    Dimension,
    Layout,
    LeftOut,
    RuleSpec,
    Semantics,
    TensorClass,
    TensorEntry,
    TensorSpec,
)
from sam3d_gguf.convert.expressions import evaluate, names
from sam3d_gguf.convert.problems import (
    BindingError,
    Problem,
    Signature,
    pair_renamed,
    shape_text,
)
from sam3d_gguf.convert.rules import (
    Finite,
    IndexRange,
    Interval,
    Parents,
    Permutation,
    Positive,
    PrefixRelation,
    QkvBiasMask,
    Rule,
    SortedUniqueCoo,
    ValueRules,
)
from sam3d_gguf.schemas.errors import ContractError

Precision: TypeAlias = Literal["source", "f32"]

_FLOATS = frozenset(("BF16", "F16", "F32", "F64"))
_Shape: TypeAlias = "tuple[int, ...]"
_GGUF_TYPES: Mapping[Precision, Mapping[str, str]] = {
    "source": {"BF16": "BF16", "F16": "F16", "F32": "F32", "I64": "I32", "I32": "I32"},
    "f32": {"BF16": "F32", "F16": "F32", "F32": "F32", "I64": "I32", "I32": "I32"},
}
_INDEX = re.compile(r"\{([a-z])\}")
_INDEX_DIGITS = r"(0|[1-9][0-9]{0,5})"


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """A tensor with all its numbers.

    Attributes:
        name: in the single-file GGUF.
        source_name: in the source.
        parts: the parts of the model that need it.
        cls: learned, constant, geometry, index or training.
        source_dtype: as safetensors names it.
        shape: PyTorch order.
        rules: every value rule, that floats are finite included.
        note: anything a reader should know, or "".
        stored_shape: in the GGUF, PyTorch order.
        layout: how the GGUF stores it, where not as the source does.
    """

    name: str
    source_name: str
    parts: tuple[str, ...]
    cls: TensorClass
    source_dtype: str
    shape: tuple[int, ...]
    rules: tuple[Rule, ...]
    note: str
    stored_shape: tuple[int, ...]
    layout: Layout | None

    @property
    def gguf_dtype(self) -> str:
        """The GGUF type at precision `source`."""
        return self.gguf_type("source")

    def gguf_type(self, precision: Precision) -> str:
        """Returns the GGUF type at a precision: exact for floats, I32 for (checked) I64."""
        return _GGUF_TYPES[precision][self.source_dtype]


@dataclass(frozen=True, slots=True)
class AddedTensor:
    """A tensor of `value` that the source lacks and the safetensors and components hold."""

    source_name: str
    part: str
    cls: TensorClass
    dtype: str
    shape: tuple[int, ...]
    value: int
    reason: str


@dataclass(frozen=True, slots=True)
class BoundContract:
    """A contract with all its numbers.

    Attributes:
        contract: the contract.
        dims: value of every dimension (of every one that its parts need).
        tensors: the tensors by source name, in contract order.
        left_out: the tensors of the source that the GGUF does not hold, by source name.
        shared: the keys of tensors that are stored once.
    """

    contract: ContractData
    dims: Mapping[str, int]
    tensors: Mapping[str, BoundTensor]
    left_out: Mapping[str, LeftOut]
    shared: frozenset[str] = frozenset()

    @property
    def is_official(self) -> bool:
        """Whether every dimension has its official value."""
        return all(self.dims.get(d.name) == d.official for d in self.contract.dimensions)

    @property
    def by_name(self) -> dict[str, BoundTensor]:
        """The tensors by GGUF name."""
        return {tensor.name: tensor for tensor in self.tensors.values()}

    @property
    def added(self) -> tuple[AddedTensor, ...]:
        """The tensors to add to the safetensors and component files."""
        return tuple(
            AddedTensor(
                a.source, a.part, a.cls, a.dtype, _shape(a.shape, self.dims), a.value, a.reason
            )
            for a in self.contract.added
        )

    def part(self, name: str) -> tuple[BoundTensor, ...]:
        """Returns the tensors that a part of the model needs, in contract order."""
        return tuple(tensor for tensor in self.tensors.values() if name in tensor.parts)

    def semantics(self) -> tuple[Semantics, ...]:
        """Returns all metadata that changes results: the constants and the bound dimensions."""
        dims = (d for d in self.contract.dimensions if d.key is not None and d.name in self.dims)
        bound = (Semantics(str(d.key), "uint32", self.dims[d.name]) for d in dims)
        shared = (Semantics(s.key, "bool", s.key in self.shared) for s in self.contract.shared)
        return (*self.contract.semantics, *bound, *shared)

    def sharing(self, keys: frozenset[str]) -> BoundContract:
        """Returns the contract with the tensors of these keys of `shared` stored once."""
        out = {n: t for n in self.tensors if (t := _left_out_as(self.contract, n, keys))}
        kept = {name: tensor for name, tensor in self.tensors.items() if name not in out}
        left_out = {**self.left_out, **out}
        return replace(self, tensors=MappingProxyType(kept), left_out=left_out, shared=keys)

    def value_rules(self) -> ValueRules:
        """Returns a fresh check of all value rules."""
        return ValueRules([PrefixRelation(r.prefix, r.parents) for r in self.contract.relations])


def expand_official(contract: ContractData) -> BoundContract:
    """Returns a contract at its official dimensions."""
    dims = {d.name: d.official for d in contract.dimensions}
    return _bound(contract, dims, _expand(contract, contract.entries, dims), {})


def bind(
    contract: ContractData,
    tensors: Mapping[str, TensorSpec],
    *,
    given: Mapping[str, int],
    official: bool = False,
    where: str = "tensors",
    precision: Precision | None = None,
    parts: frozenset[str] | None = None,
    shared: frozenset[str] = frozenset(),
) -> BoundContract:
    """Binds a contract to tensors; see `Contract.bind` and `Contract.bind_gguf`.

    Args:
        contract: the contract.
        tensors: dtype and shape by name.
        given: dimensions that the configuration or metadata states.
        official: the dimensions must be the official ones.
        where: what errors call the tensors.
        precision: set where the tensors are those of a GGUF, by GGUF name and type.
        parts: the parts of the model that are present; all by default.
        shared: the keys of tensors that a GGUF holds once.

    Raises:
        BindingError: one error with everything that is wrong.
    """
    entries = [e for e in contract.entries if parts is None or parts & set(e.parts)]
    if precision is not None:
        entries = [e for e in entries if _left_out_as(contract, e.source, frozenset()) is None]
    search = _Search(contract, entries, tensors, given, by_gguf_name=precision is not None)
    dims = {d.name: d.official for d in contract.dimensions} if official else search.dimensions()
    problems = _dimension_problems(contract, dims, given)
    if problems and not official:
        # Unbounded dimensions must not be expanded into names.
        raise BindingError(problems, contract=contract.name, where=where)
    expected = _expand(contract, entries, dims)
    if precision is not None:
        expected = [e for e in expected if _left_out_as(contract, e.source_name, shared) is None]
    left_out = {} if precision else left_out_tensors(contract, tensors)
    problems += _equation_problems(contract, dims)
    problems += _tensor_problems(expected, left_out, dims, tensors, precision)
    if not problems:
        whole = parts is None and len(entries) == len(contract.entries)
        keyed = () if parts else tuple(d.name for d in contract.dimensions if d.key is not None)
        problems += _unbound(contract, None if whole else entries, dims, keyed)
    if problems:
        raise BindingError(problems, contract=contract.name, where=where)
    return _bound(contract, dims, expected, left_out, shared)


@dataclass(frozen=True, slots=True)
class _Expected:
    """A tensor that must be there; its shape is None while a dimension has no value."""

    entry: TensorEntry
    source_name: str
    name: str
    shape: _Shape | None
    stored_shape: _Shape | None

    def signature(self, precision: Precision | None) -> Signature:
        if precision is None:
            return self.entry.dtype, self.shape or ()
        return _GGUF_TYPES[precision][self.entry.dtype], self.stored_shape or ()

    def text(self, precision: Precision | None) -> str:
        """What the tensor must be, in numbers or else in dimension names."""
        dtype, shape = self.signature(precision)
        axes = self.entry.shape if precision is None else self.entry.stored_shape
        known = self.shape is not None
        return shape_text(dtype, shape) if known else f"{dtype} [{', '.join(axes)}]"


@dataclass(frozen=True, slots=True)
class _Search:
    """Finds the dimensions of a contract in tensors and stated values."""

    contract: ContractData
    entries: list[TensorEntry]
    tensors: Mapping[str, TensorSpec]
    given: Mapping[str, int]
    by_gguf_name: bool

    def dimensions(self) -> dict[str, int]:
        """Returns every dimension that could be bound, none of them checked."""
        dims: dict[str, int] = {}
        for dimension in self._bound_by("constant"):
            dims[dimension.name] = int(str(dimension.argument))
        for dimension in self._bound_by("config"):
            if dimension.name in self.given:
                dims[dimension.name] = self.given[dimension.name]
        for dimension in self._bound_by("index"):
            count = self._index_count(str(dimension.argument))
            if count is not None:
                dims[dimension.name] = count
        if all(0 < dims.get(d.name, 1) <= d.maximum for d in self.contract.dimensions):
            dims |= self._most_frequent_sizes(dims)
        for dimension in self._bound_by("expression"):
            value = _try_evaluate(str(dimension.argument), dims)
            if value is not None:
                dims[dimension.name] = value
        return dims

    def _bound_by(self, source: str) -> Iterator[Dimension]:
        return (d for d in self.contract.dimensions if d.source == source)

    def _index_count(self, letter: str) -> int | None:
        """One more than the highest index that at least half of the tensors it repeats have."""
        patterns = [p for e in self.entries if f"{{{letter}}}" in (p := self._pattern(e))]
        regexes = [
            re.compile(re.escape(p).replace(rf"\{{{letter}\}}", _INDEX_DIGITS)) for p in patterns
        ]
        seen: Counter[int] = Counter()
        for name in self.tensors:
            for regex in regexes:
                match = regex.fullmatch(name)
                if match:
                    seen[int(match[1])] += 1
                    break
        complete = [index for index, count in seen.items() if 2 * count >= len(patterns)]
        return max(complete) + 1 if complete else None

    def _most_frequent_sizes(self, dims: Mapping[str, int]) -> dict[str, int]:
        votes = {d.name: Counter[int]() for d in self._bound_by("tensors")}
        for expected in _expand(self.contract, self.entries, dims):
            name = expected.name if self.by_gguf_name else expected.source_name
            spec = self.tensors.get(name)
            entry = expected.entry
            axes = entry.stored_shape if self.by_gguf_name else entry.shape
            if spec is None or len(spec.shape) != len(axes):
                continue
            for axis, size in zip(axes, spec.shape, strict=True):
                if axis in votes:
                    votes[axis][size] += 1
        return {name: sizes.most_common(1)[0][0] for name, sizes in votes.items() if sizes}

    def _pattern(self, entry: TensorEntry) -> str:
        return entry.name if self.by_gguf_name else entry.source


def _expand(
    contract: ContractData, entries: Iterable[TensorEntry], dims: Mapping[str, int]
) -> list[_Expected]:
    """Returns every tensor of the entries, one per value of an index whose dimension has one."""
    result: list[_Expected] = []
    for entry in entries:
        letters = _INDEX.findall(entry.source)
        counts = [dims.get(contract.indices[letter]) for letter in letters]
        shape, stored = _try_shape(entry.shape, dims), _try_shape(entry.stored_shape, dims)
        if None in counts:
            result.append(_Expected(entry, entry.source, entry.name, None, None))
            continue
        for values in itertools.product(*(range(count) for count in counts if count is not None)):
            source, name = entry.source, entry.name
            for letter, value in zip(letters, values, strict=True):
                source = source.replace(f"{{{letter}}}", str(value))
                name = name.replace(f"{{{letter}}}", str(value))
            result.append(_Expected(entry, source, name, shape, stored))
    return result


def _bound(
    contract: ContractData,
    dims: Mapping[str, int],
    expected: Iterable[_Expected],
    left_out: Mapping[str, LeftOut],
    shared: frozenset[str] = frozenset(),
) -> BoundContract:
    tensors = {
        e.source_name: BoundTensor(
            name=e.name,
            source_name=e.source_name,
            parts=e.entry.parts,
            cls=e.entry.cls,
            source_dtype=e.entry.dtype,
            shape=_shape(e.entry.shape, dims),
            rules=_rules(e.entry, dims),
            note=e.entry.note,
            stored_shape=_shape(e.entry.stored_shape, dims),
            layout=e.entry.layout,
        )
        for e in expected
    }
    bound = BoundContract(
        contract, MappingProxyType(dict(dims)), MappingProxyType(tensors), dict(left_out)
    )
    return bound.sharing(shared)


def _rules(entry: TensorEntry, dims: Mapping[str, int]) -> tuple[Rule, ...]:
    finite = (Finite(),) if entry.dtype in _FLOATS else ()
    return (*finite, *(_rule(spec, dims) for spec in entry.rules))


def _rule(spec: RuleSpec, dims: Mapping[str, int]) -> Rule:
    numbers = {
        key: evaluate(value, dims) if isinstance(value, str) else value
        for key, value in spec.arguments.items()
    }
    match spec.kind:
        case "index_range":
            return IndexRange(int(numbers["minimum"]), int(numbers["maximum"]))
        case "permutation":
            return Permutation(int(numbers["minimum"]), int(numbers["maximum"]))
        case "interval":
            return Interval(numbers["low"], numbers["high"])
        case "sorted_unique_coo":
            return SortedUniqueCoo(int(numbers["rows"]), int(numbers["columns"]))
        case "positive":
            return Positive()
        case "qkv_bias_mask":
            return QkvBiasMask()
        case "parents":
            return Parents()
        case _:
            raise ValueError(f"unknown rule {spec.kind!r}")


def _shape(axes: Iterable[str], dims: Mapping[str, int]) -> _Shape:
    return tuple(evaluate(axis, dims) for axis in axes)


def _try_shape(axes: Iterable[str], dims: Mapping[str, int]) -> _Shape | None:
    sizes = [_try_evaluate(axis, dims) for axis in axes]
    return None if None in sizes else tuple(size for size in sizes if size is not None)


def _try_evaluate(text: str, dims: Mapping[str, int]) -> int | None:
    try:
        return evaluate(text, dims)
    except (KeyError, ContractError):
        return None


def _dimension_problems(
    contract: ContractData, dims: Mapping[str, int], given: Mapping[str, int]
) -> list[Problem]:
    problems: list[Problem] = []
    for d in contract.dimensions:
        value = dims.get(d.name)
        label = f"{d.name} ({d.description})"
        if value is not None and not 1 <= value <= d.maximum:
            problems.append(Problem("dimension", label, str(value), f"1 to {d.maximum}"))
        elif value is not None and given.get(d.name, value) != value:
            problems.append(Problem("dimension", label, str(given[d.name]), str(value)))
    return problems


def _unbound(
    contract: ContractData,
    entries: Iterable[TensorEntry] | None,
    dims: Mapping[str, int],
    keyed: Iterable[str],
) -> list[Problem]:
    """Names the dimensions that the entries, or else the whole model, need and nothing gave.

    `keyed` are those that metadata must state beside.
    """
    if entries is None:
        needed = {d.name for d in contract.dimensions}
    else:
        needed = {name for e in entries for text in _expressions(e) for name in names(text)}
        needed |= set(keyed)
    return [
        Problem("dimension", f"{d.name} ({d.description})", "unknown", f"{d.source} {d.argument}")
        for d in contract.dimensions
        if d.name in needed and d.name not in dims
    ]


def _expressions(entry: TensorEntry) -> Iterator[str]:
    yield from entry.shape
    for rule in entry.rules:
        yield from (value for value in rule.arguments.values() if isinstance(value, str))


def _equation_problems(contract: ContractData, dims: Mapping[str, int]) -> list[Problem]:
    problems: list[Problem] = []
    for equation in contract.equations:
        if not names(equation.left) | names(equation.right) <= dims.keys():
            continue
        left, right = _try_evaluate(equation.left, dims), _try_evaluate(equation.right, dims)
        if left is None or left != right:
            label = f"{equation.left} = {equation.right} ({equation.why})"
            problems.append(Problem("equation", label, f"{left} = {right}"))
    for d in contract.dimensions:
        if d.source == "expression" and d.name not in dims:
            text = str(d.argument)
            if names(text) <= dims.keys():
                values = ", ".join(f"{name} {dims[name]}" for name in sorted(names(text)))
                problems.append(Problem("equation", f"{d.name} = {text}", values, "a whole number"))
    return problems


def _tensor_problems(
    expected: Iterable[_Expected],
    left_out: Mapping[str, LeftOut],
    dims: Mapping[str, int],
    tensors: Mapping[str, TensorSpec],
    precision: Precision | None,
) -> list[Problem]:
    wanted = {(e.name if precision else e.source_name): e for e in expected}
    missing = {name: e for name, e in wanted.items() if name not in tensors}
    extra = {
        name: (spec.dtype, spec.shape)
        for name, spec in tensors.items()
        if name not in wanted and name not in left_out
    }
    renamed = pair_renamed({n: e.signature(precision) for n, e in missing.items()}, extra)
    paired = {name for pair in renamed for name in pair}
    problems = [Problem("renamed", found, "", name) for name, found in renamed]
    problems += [
        Problem("missing", name, "", e.text(precision))
        for name, e in missing.items()
        if name not in paired
    ]
    problems += [
        Problem("extra", name, shape_text(*signature))
        for name, signature in extra.items()
        if name not in paired
    ]
    for name, e in wanted.items():
        spec = tensors.get(name)
        if spec is not None:
            problems += _difference(name, spec, e, precision)
    for name, entry in left_out.items():
        problems += _left_out_difference(name, tensors[name], entry, dims)
    return problems


def _difference(
    name: str, spec: TensorSpec, expected: _Expected, precision: Precision | None
) -> Iterator[Problem]:
    found, wanted = shape_text(spec.dtype, spec.shape), expected.text(precision)
    known = expected.shape is not None
    axes = expected.entry.shape if precision is None else expected.entry.stored_shape
    shape = expected.signature(precision)[1]
    if spec.shape != shape if known else len(spec.shape) != len(axes):
        yield Problem("reshaped", name, found, wanted)
    elif spec.dtype != expected.signature(precision)[0]:
        yield Problem("retyped", name, found, wanted)


def all_left_out(
    contract: ContractData, tensors: Iterable[str], shared: frozenset[str]
) -> dict[str, LeftOut]:
    """Those of a source's tensors, by name, that no GGUF holds; `shared` as for `bind`."""
    names = list(tensors)
    omitted = {n: entry for n in names if (entry := _left_out_as(contract, n, shared))}
    return left_out_tensors(contract, names) | omitted


def left_out_tensors(contract: ContractData, tensors: Iterable[str]) -> dict[str, LeftOut]:
    """Those of a source's tensors, by name, that its contract knows and leaves out."""
    patterns = [
        (re.compile(re.escape(entry.source).replace(r"\*", "[A-Za-z0-9_]+")), entry)
        for entry in contract.left_out
    ]
    return {
        name: entry for name in tensors for pattern, entry in patterns if pattern.fullmatch(name)
    }


def _left_out_as(contract: ContractData, name: str, shared: frozenset[str]) -> LeftOut | None:
    """Why a tensor that the contract describes is not in a GGUF, None if it is there."""
    for entry in contract.omitted:
        if name.startswith(entry.prefix):
            return LeftOut(name, None, None, "learned", entry.reason)
    for copy in contract.shared:
        if copy.key in shared and name.startswith(copy.prefix):
            return LeftOut(name, None, None, "learned", copy.reason)
    return None


def _left_out_difference(
    name: str, spec: TensorSpec, entry: LeftOut, dims: Mapping[str, int]
) -> Iterator[Problem]:
    found = shape_text(spec.dtype, spec.shape)
    if entry.shape is not None:
        shape = _try_shape(entry.shape, dims)
        if shape is not None and shape != spec.shape:
            yield Problem("reshaped", name, found, shape_text(entry.dtype or spec.dtype, shape))
            return
    if entry.dtype is not None and spec.dtype != entry.dtype:
        yield Problem("retyped", name, found, entry.dtype)

"""The parts of a contract, as typed data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Layout: TypeAlias = Literal["folded", "channels_last"]
TensorClass: TypeAlias = Literal["learned", "constant", "geometry", "index", "training"]
SemanticsType: TypeAlias = Literal[
    "string", "bool", "uint32", "float32", "uint32[]", "int32[]", "float32[]", "string[]"
]
SemanticsValue: TypeAlias = str | bool | int | float | tuple[str | int | float, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtype (as safetensors names it; a GGUF type where a GGUF is bound) and PyTorch shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dimension:
    """A named size.

    Attributes:
        name: as shapes refer to it.
        official: its value in the official model.
        maximum: the largest value that any source may have.
        source: what binds it: constant, config, tensors, index or expression.
        argument: the constant, configuration paths, index letter or expression.
        key: the metadata key that holds the bound value, if any.
        description: what it counts.
        default: its value where the configuration has none.
        times: the dimension that the configured ratio multiplies.
    """

    name: str
    official: int
    maximum: int
    source: Literal["constant", "config", "tensors", "index", "expression"]
    argument: str | int | bool | tuple[str, ...]
    key: str | None
    description: str
    default: int | None = None
    times: str | None = None


@dataclass(frozen=True, slots=True)
class Equation:
    """Two expressions that must be equal, and why."""

    left: str
    right: str
    why: str


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """A value rule whose numbers are still expressions (or plain numbers)."""

    kind: str
    arguments: Mapping[str, str | float]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One line of a contract: a tensor, or one per value of the index in its name.

    Attributes:
        source: name in the source; {i} stands for every value of index i.
        name: name in the GGUF.
        dtype: dtype in the source.
        shape: one expression per axis, PyTorch order.
        parts: the parts of the model that need it.
        cls: what its numbers are.
        rules: its value rules, without the rule that floats are finite, which all floats have.
        note: anything a reader should know, or "".
        layout: how the GGUF stores it, where not as the source does.
    """

    source: str
    name: str
    dtype: str
    shape: tuple[str, ...]
    parts: tuple[str, ...]
    cls: TensorClass
    rules: tuple[RuleSpec, ...]
    note: str
    layout: Layout | None = None

    @property
    def stored_shape(self) -> tuple[str, ...]:
        """The shape in the GGUF: one expression per axis, PyTorch order."""
        if self.layout is None:
            return self.shape
        first, *rest = self.shape
        inner, last = (rest[:-1], rest[-1]) if self.layout == "folded" else (rest[1:], rest[0])
        return (first, "*".join(f"({axis})" for axis in inner), last)


@dataclass(frozen=True, slots=True)
class Relation:
    """A rule between two tensors, by source name."""

    rule: str
    prefix: str
    parents: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A tensor that the source may hold and the GGUF does not; `*` stands for one name segment."""

    source: str
    dtype: str | None
    shape: tuple[str, ...] | None
    cls: TensorClass
    reason: str


@dataclass(frozen=True, slots=True)
class Rename:
    """What tensor names of the source begin with, and what stands for it in the GGUF."""

    prefix: str
    name: str


@dataclass(frozen=True, slots=True)
class Omitted:
    """Tensors, by the beginning of their names, that a source must hold and no GGUF does."""

    prefix: str
    reason: str


@dataclass(frozen=True, slots=True)
class Shared:
    """Tensors that a GGUF holds once if they equal others, as the bool `key` says.

    Those that begin with `prefix` are then left out, for those that begin with `of` instead.
    """

    prefix: str
    of: str
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Added:
    """A tensor that the source lacks and the safetensors and component files hold."""

    source: str
    dtype: str
    shape: tuple[str, ...]
    part: str
    cls: TensorClass
    value: int
    reason: str


@dataclass(frozen=True, slots=True)
class Semantics:
    """A metadata entry that changes results; float32 values mean the nearest float32."""

    key: str
    value_type: SemanticsType
    value: SemanticsValue


@dataclass(frozen=True, slots=True)
class Companion:
    """A model that must be used with this one, and the dimensions in which both must agree."""

    role: str
    architecture: str
    equal_dimensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ContractData:
    """Everything in a contract file; `indices` maps an index letter to its dimension."""

    name: str
    architecture: str
    comment: str
    dimensions: tuple[Dimension, ...]
    equations: tuple[Equation, ...]
    indices: Mapping[str, str]
    parts: Mapping[str, str]
    entries: tuple[TensorEntry, ...]
    relations: tuple[Relation, ...]
    left_out: tuple[LeftOut, ...]
    added: tuple[Added, ...]
    semantics: tuple[Semantics, ...]
    companions: tuple[Companion, ...]
    renames: tuple[Rename, ...] = ()
    omitted: tuple[Omitted, ...] = ()
    shared: tuple[Shared, ...] = ()

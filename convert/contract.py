"""The contracts: what the tensors and metadata of each model must be, as typed data.

>>> contract = load_contract("body")
>>> len(contract.official().tensors)
1127

A contract file lies in `schemas/contracts/`. Its shapes are expressions over named dimensions;
binding gives every dimension a number and every tensor its shape, dtype and rules.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from sam3d_gguf.convert.binding import BoundContract, Precision, bind, expand_official
from sam3d_gguf.convert.config import Config
from sam3d_gguf.convert.contract_types import (
    Added,
    Companion,
    ContractData,
    Dimension,
    Equation,
    LeftOut,
    Omitted,
    Relation,
    Rename,
    RuleSpec,
    Semantics,
    Shared,
    TensorEntry,
    TensorSpec,
)
from sam3d_gguf.extractors.models import Model, ObjectsModel, contract_name
from sam3d_gguf.schemas.documents import package_document

__all__ = ["Contract", "ContractName", "TensorSpec", "load_contract"]

ContractName: TypeAlias = Literal["body", "mhr.lod1"] | ObjectsModel


@dataclass(frozen=True, slots=True)
class Contract(ContractData):
    """A contract that can be bound."""

    def official(self) -> BoundContract:
        """Returns the contract at the official dimensions."""
        return expand_official(self)

    def bind(
        self,
        tensors: Mapping[str, TensorSpec],
        config: Config | None = None,
        *,
        official: bool = False,
        where: str = "tensors",
    ) -> BoundContract:
        """Binds the contract to the tensors of a source, by their source names.

        Args:
            tensors: dtype and shape of every tensor of the source.
            config: the model configuration, where the contract takes dimensions from one.
            official: the dimensions must be the official ones (a pinned source), else they are
                taken from the configuration and the tensors and checked against each other.
            where: what errors call the source.

        Raises:
            BindingError: one error with everything that is wrong.
        """
        given = {} if config is None else self._config_dimensions(config)
        return bind(self, tensors, given=given, official=official, where=where)

    def bind_gguf(
        self,
        tensors: Mapping[str, TensorSpec],
        dims: Mapping[str, int],
        *,
        precision: Precision = "source",
        parts: frozenset[str] | None = None,
        shared: frozenset[str] = frozenset(),
        official: bool = False,
        where: str = "tensors",
    ) -> BoundContract:
        """Binds the contract to the tensors of a GGUF, by their GGUF names and types.

        Args:
            tensors: GGUF type and PyTorch shape of every tensor of the file.
            dims: the dimensions that the file's metadata states; the tensors must agree.
            precision: the precision that the file was converted at.
            parts: the parts that the file holds; all by default.
            shared: the keys of `shared` that are true.
            official: the dimensions must be the official ones.
            where: what errors call the file.

        Raises:
            BindingError: one error with everything that is wrong.
        """
        return bind(
            self,
            tensors,
            given=dims,
            official=official,
            where=where,
            precision=precision,
            parts=parts,
            shared=shared,
        )

    def stated_dimensions(self, metadata: Mapping[str, object]) -> dict[str, int]:
        """Returns the dimensions that metadata states as integers, by dimension name."""
        values = {d.name: metadata.get(d.key) for d in self.dimensions if d.key is not None}
        return {name: value for name, value in values.items() if type(value) is int}

    def stated_shared(self, metadata: Mapping[str, object]) -> frozenset[str]:
        """Returns the keys of the tensors that metadata says are stored once."""
        return frozenset(s.key for s in self.shared if metadata.get(s.key) is True)

    def _config_dimensions(self, config: Config) -> dict[str, int]:
        """The dimensions that a configuration gives; what it multiplies comes before the ratio."""
        dims: dict[str, int] = {}
        for d in self.dimensions:
            if d.source == "config":
                factor = None if d.times is None else dims[d.times]
                dims[d.name] = config.size(_paths(d), default=d.default, factor=factor)
        return dims


@functools.cache
def load_contract(name: ContractName) -> Contract:
    """Returns a contract that ships with this package."""
    document = package_document(
        "sam3d_gguf.schemas", "contracts", f"{name}.json", schema_name="contract"
    )
    renames = tuple(Rename(**r) for r in document.get("renames", ()))
    return Contract(
        name=document["name"],
        architecture=document["architecture"],
        comment=document["comment"],
        dimensions=tuple(_dimension(d) for d in document["dimensions"]),
        equations=tuple(Equation(**e) for e in document["equations"]),
        indices={i["index"]: i["dimension"] for i in document["indices"]},
        parts={p["name"]: p["description"] for p in document["parts"]},
        entries=tuple(_entry(t, renames) for t in document["tensors"]),
        relations=tuple(Relation(**r) for r in document["relations"]),
        left_out=tuple(_left_out(t) for t in document["left_out"]),
        added=tuple(_added(t) for t in document["added"]),
        semantics=tuple(_semantics(s) for s in document["semantics"]),
        companions=tuple(_companion(c) for c in document["companions"]),
        renames=renames,
        omitted=tuple(Omitted(**o) for o in document.get("omitted", ())),
        shared=tuple(Shared(**s) for s in document.get("shared", ())),
    )


def load_model_contract(model: Model) -> Contract:
    """Returns the contract of a model's single files."""
    return load_contract(cast("ContractName", contract_name(model)))


def _paths(dimension: Dimension) -> tuple[str, ...]:
    argument = dimension.argument
    return argument if isinstance(argument, tuple) else (str(argument),)


def _dimension(d: Any) -> Dimension:
    ((source, stated),) = d["from"].items()
    argument: Any = tuple(stated) if source == "config" and not isinstance(stated, str) else stated
    return Dimension(
        d["name"],
        d["official"],
        d["maximum"],
        source,
        argument,
        d.get("key"),
        d["description"],
        d.get("default"),
        d.get("times"),
    )


def _entry(t: Any, renames: tuple[Rename, ...]) -> TensorEntry:
    return TensorEntry(
        source=t["source"],
        name=t.get("name") or renamed(t["source"], renames),
        dtype=t["dtype"],
        shape=tuple(t["shape"]),
        parts=tuple(t["parts"]),
        cls=t["class"],
        rules=tuple(_rule(r) for r in t.get("rules", ())),
        note=t.get("note", ""),
        layout=t.get("layout"),
    )


def renamed(source: str, renames: Iterable[Rename]) -> str:
    """Returns the GGUF name of a tensor: its source name with another beginning.

    No name begins with what stands for a prefix, so that the rules say of each GGUF name which
    source name it was.
    """
    for rule in renames:
        if source.startswith(rule.prefix):
            return rule.name + source.removeprefix(rule.prefix)
    return source


def _rule(r: Any) -> RuleSpec:
    return RuleSpec(r["rule"], {key: value for key, value in r.items() if key != "rule"})


def _left_out(t: Any) -> LeftOut:
    shape = tuple(t["shape"]) if "shape" in t else None
    return LeftOut(t["source"], t.get("dtype"), shape, t["class"], t["reason"])


def _added(t: Any) -> Added:
    return Added(
        t["source"], t["dtype"], tuple(t["shape"]), t["part"], t["class"], t["value"], t["reason"]
    )


def _semantics(s: Any) -> Semantics:
    value: Any = s["value"]
    is_array = s["value_type"].endswith("[]")
    return Semantics(s["key"], s["value_type"], tuple(value) if is_array else value)


def _companion(c: Any) -> Companion:
    return Companion(c["role"], c["architecture"], tuple(c["equal_dimensions"]))

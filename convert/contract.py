"""The contracts: what the tensors and metadata of each model must be, as typed data.

>>> contract = load_contract("body")
>>> len(contract.official().tensors)
1127

A contract file lies in `schemas/contracts/`. Its shapes are expressions over named dimensions;
binding gives every dimension a number and every tensor its shape, dtype and rules.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sam3d_gguf.convert.binding import BoundContract, Precision, bind, expand_official
from sam3d_gguf.convert.config import BodyConfig
from sam3d_gguf.convert.contract_types import (
    Added,
    Companion,
    ContractData,
    Dimension,
    Equation,
    LeftOut,
    Relation,
    RuleSpec,
    Semantics,
    TensorEntry,
    TensorSpec,
)
from sam3d_gguf.schemas.documents import package_document

__all__ = ["Contract", "ContractName", "TensorSpec", "load_contract"]

ContractName: TypeAlias = Literal["body", "mhr.lod1"]


@dataclass(frozen=True, slots=True)
class Contract(ContractData):
    """A contract that can be bound."""

    def official(self) -> BoundContract:
        """Returns the contract at the official dimensions."""
        return expand_official(self)

    def bind(
        self,
        tensors: Mapping[str, TensorSpec],
        config: BodyConfig | None = None,
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
        official: bool = False,
        where: str = "tensors",
    ) -> BoundContract:
        """Binds the contract to the tensors of a GGUF, by their GGUF names and types.

        Args:
            tensors: GGUF type and PyTorch shape of every tensor of the file.
            dims: the dimensions that the file's metadata states; the tensors must agree.
            precision: the precision that the file was converted at.
            parts: the parts that the file holds; all by default.
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
        )

    def stated_dimensions(self, metadata: Mapping[str, object]) -> dict[str, int]:
        """Returns the dimensions that metadata states as integers, by dimension name."""
        values = {d.name: metadata.get(d.key) for d in self.dimensions if d.key is not None}
        return {name: value for name, value in values.items() if type(value) is int}

    def _config_dimensions(self, config: BodyConfig) -> dict[str, int]:
        dims = (d for d in self.dimensions if d.source == "config")
        return {d.name: config.integer(str(d.argument)) for d in dims}


@functools.cache
def load_contract(name: ContractName) -> Contract:
    """Returns a contract that ships with this package."""
    document = package_document(
        "sam3d_gguf.schemas", "contracts", f"{name}.json", schema_name="contract"
    )
    return Contract(
        name=document["name"],
        architecture=document["architecture"],
        comment=document["comment"],
        dimensions=tuple(_dimension(d) for d in document["dimensions"]),
        equations=tuple(Equation(**e) for e in document["equations"]),
        indices={i["index"]: i["dimension"] for i in document["indices"]},
        parts={p["name"]: p["description"] for p in document["parts"]},
        entries=tuple(_entry(t) for t in document["tensors"]),
        relations=tuple(Relation(**r) for r in document["relations"]),
        left_out=tuple(_left_out(t) for t in document["left_out"]),
        added=tuple(_added(t) for t in document["added"]),
        semantics=tuple(_semantics(s) for s in document["semantics"]),
        companions=tuple(_companion(c) for c in document["companions"]),
    )


def _dimension(d: Any) -> Dimension:
    ((source, argument),) = d["from"].items()
    return Dimension(
        d["name"],
        d["official"],
        d["maximum"],
        source,
        argument,
        d.get("key"),
        d["description"],
    )


def _entry(t: Any) -> TensorEntry:
    return TensorEntry(
        source=t["source"],
        name=t.get("name", t["source"]),
        dtype=t["dtype"],
        shape=tuple(t["shape"]),
        parts=tuple(t["parts"]),
        cls=t["class"],
        rules=tuple(_rule(r) for r in t.get("rules", ())),
        note=t.get("note", ""),
    )


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

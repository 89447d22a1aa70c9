"""Read rules.json: an ordered list of limits, one for each tensor or name pattern."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import JsonValue, as_array, as_object, load_file, loads

Limits = Literal["plain", "free-running"]
_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Rule:
    """Limits of the tensors that a name or shell-style pattern selects.

    Attributes:
        name: a tensor name, or a pattern with `*`, `?` or `[...]`.
        mode: `exact` (equal bytes), `float` (largest difference and relative L2 norm) or
            `euler` (largest raw difference in radians; relative L2 norm of (sin, cos) pairs).
        max_abs: limit of the largest absolute difference.
        relative_l2: limit of |candidate - reference| / |reference|; both limits must hold.
        zero_reference_floor: a reference whose L2 norm is at most this is judged by `max_abs`
            alone.
        free_running_max_abs, free_running_relative_l2: replacements for runs that start from
            their own intermediate boxes; None keeps the plain limit.
        file: base name of the reference that must hold the tensor.
    """

    name: str
    mode: str
    max_abs: float = 0.0
    relative_l2: float = 0.0
    zero_reference_floor: float = 0.0
    free_running_max_abs: float | None = None
    free_running_relative_l2: float | None = None
    file: str | None = None

    @property
    def is_pattern(self) -> bool:
        """Whether `name` selects by pattern."""
        return any(mark in self.name for mark in "*?[")

    def bounds(self, limits: Limits) -> tuple[float, float]:
        """(max_abs, relative_l2) under the chosen limits; (0, 0) asks for equal bytes."""
        max_abs, relative = self.max_abs, self.relative_l2
        if self.mode == "exact":
            max_abs = relative = 0.0
        if limits == "free-running":
            if self.free_running_max_abs is not None:
                max_abs = self.free_running_max_abs
                if self.mode == "exact" and self.free_running_relative_l2 is None:
                    relative = math.inf
            if self.free_running_relative_l2 is not None:
                relative = self.free_running_relative_l2
        return max_abs, relative


@dataclass(frozen=True, slots=True)
class Rules:
    """An ordered rule list; the first rule that matches a name decides."""

    rules: tuple[Rule, ...]
    _by_name: Mapping[str, int] = field(init=False, repr=False)
    _patterns: tuple[tuple[int, re.Pattern[str]], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names: dict[str, int] = {}
        for position, rule in enumerate(self.rules):
            names.setdefault(rule.name, position)
        patterns = tuple(
            (position, re.compile(fnmatch.translate(rule.name)))
            for position, rule in enumerate(self.rules)
            if rule.is_pattern
        )
        object.__setattr__(self, "_by_name", names)
        object.__setattr__(self, "_patterns", patterns)

    def find(self, name: str) -> tuple[int, Rule] | None:
        """The deciding rule and its position, or None."""
        named = self._by_name.get(name, len(self.rules))
        for position, pattern in self._patterns:
            if position >= named:
                break
            if pattern.match(name):
                return position, self.rules[position]
        return (named, self.rules[named]) if named < len(self.rules) else None


def load_rules(path: Path) -> Rules:
    """Read a rules file, a document of the schema `parity-rules`.

    Raises:
        InputError: not readable, or a rule that is not understood.
    """
    return _rules(load_file(path, schema="parity-rules", max_bytes=_MAX_BYTES), str(path))


def parse_rules(data: bytes, *, where: str) -> Rules:
    """Parse the text of a rules file.

    Raises:
        InputError: not strict JSON, or a rule that is not understood.
    """
    return _rules(loads(data, where=where, schema="parity-rules", max_bytes=_MAX_BYTES), where)


def _rules(document: JsonValue, where: str) -> Rules:
    entries = as_array(as_object(document)["tensors"])
    rules = tuple(_rule(as_object(entry)) for entry in entries)
    seen: set[str] = set()
    for index, rule in enumerate(rules):
        if rule.name in seen:
            raise InputError(
                f"second rule for {rule.name!r}", where=f"{where}#/tensors/{index}/name"
            )
        seen.add(rule.name)
    return Rules(rules)


def _rule(entry: dict[str, JsonValue]) -> Rule:
    known = {name: entry[name] for name in Rule.__dataclass_fields__ if name in entry}
    return Rule(**cast("dict[str, Any]", known))

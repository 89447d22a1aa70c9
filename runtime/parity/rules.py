"""Read rules.json: an ordered list of limits, one for each tensor or name pattern."""

from __future__ import annotations

import fnmatch
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from sam3d_gguf.schemas.errors import InputError

Limits = Literal["plain", "free-running"]
MODES = ("exact", "float", "euler")
_NUMBERS = (
    "max_abs",
    "relative_l2",
    "zero_reference_floor",
    "free_running_max_abs",
    "free_running_relative_l2",
)
_KNOWN = {"name", "file", "mode", *_NUMBERS, "observed_max_abs", "observed_relative_l2"}


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

    def find(self, name: str) -> tuple[int, Rule] | None:
        """The deciding rule and its position, or None."""
        for position, rule in enumerate(self.rules):
            if rule.name == name or (rule.is_pattern and fnmatch.fnmatchcase(name, rule.name)):
                return position, rule
        return None


def _reject_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def load_rules(path: Path) -> Rules:
    """Read a rules file.

    Raises:
        InputError: not readable, not JSON, or a rule that is not understood.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from error
    return parse_rules(data, where=str(path))


def parse_rules(data: bytes, *, where: str) -> Rules:
    """Parse the JSON of a rules file: `{"schema_version": 1, "tensors": [rule, ...]}`.

    Raises:
        InputError: not strict JSON, or a rule that is not understood.
    """
    try:
        document: object = json.loads(
            data, object_pairs_hook=_no_duplicates, parse_constant=_reject_constant
        )
    except (ValueError, RecursionError) as error:
        raise InputError(f"not valid JSON: {error}", where=where) from error
    entries = (
        cast("dict[str, object]", document).get("tensors") if isinstance(document, dict) else None
    )
    if (
        not isinstance(entries, list)
        or cast("dict[str, object]", document).get("schema_version") != 1
    ):
        raise InputError(
            "not a rules document", where=where, expected="schema_version 1 and a list 'tensors'"
        )
    items = cast("list[object]", entries)
    rules = tuple(_rule(item, f"{where}#/tensors/{index}") for index, item in enumerate(items))
    seen: set[str] = set()
    for index, rule in enumerate(rules):
        if rule.name in seen:
            raise InputError(
                f"second rule for {rule.name!r}", where=f"{where}#/tensors/{index}/name"
            )
        seen.add(rule.name)
    return Rules(rules)


def _rule(item: object, where: str) -> Rule:
    if not isinstance(item, dict):
        raise InputError("not an object", where=where, expected="a rule")
    values = cast("dict[str, object]", item)
    unknown = sorted(set(values) - _KNOWN)
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}", where=where)
    name, mode, file = values.get("name"), values.get("mode"), values.get("file")
    if not isinstance(name, str) or not name:
        raise InputError("no name", where=where, expected="a tensor name or pattern")
    if not isinstance(mode, str) or mode not in MODES:
        raise InputError(f"unknown mode {mode!r}", where=where, expected=", ".join(MODES))
    if file is not None and not isinstance(file, str):
        raise InputError("file is not a name", where=where)
    numbers = {key: _limit(values[key], f"{where}/{key}") for key in _NUMBERS if key in values}
    if mode != "exact" and not {"max_abs", "relative_l2"} <= set(numbers):
        raise InputError("a limit is missing", where=where, expected="max_abs and relative_l2")
    return Rule(
        name=name,
        mode=mode,
        max_abs=numbers.get("max_abs", 0.0),
        relative_l2=numbers.get("relative_l2", 0.0),
        zero_reference_floor=numbers.get("zero_reference_floor", 0.0),
        free_running_max_abs=numbers.get("free_running_max_abs"),
        free_running_relative_l2=numbers.get("free_running_relative_l2"),
        file=file,
    )


def _limit(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError("not a number", where=where)
    if not math.isfinite(value) or value < 0:
        raise InputError(f"limit {value}", where=where, expected="a finite number, 0 or more")
    return float(value)

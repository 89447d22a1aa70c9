"""A model's configuration: dimensions are read, every other value is checked.

>>> data = open("model_config.yaml", "rb").read()
>>> config = load_config(data, "body-config", where="model_config.yaml")
>>> config.integer("MODEL.DECODER.DIM")
1024

The YAML is read without anything that can run code, refer to another place or mean two things:
tags, anchors, aliases, merge keys, duplicate keys, NaN and more than one document are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import yaml

from sam3d_gguf.extractors.printable import printable
from sam3d_gguf.schemas.documents import faults
from sam3d_gguf.schemas.errors import ContractError, InputError
from sam3d_gguf.schemas.strict_json import JsonValue, shorten

MAX_BYTES = 64 << 10
_MAX_DEPTH = 16
_MAX_INTEGER_BITS = 64
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration that meets its schema; `values` is the whole document, `where` its file."""

    values: Mapping[str, JsonValue]
    where: str = ""

    def integer(self, path: str) -> int:
        """Returns the integer at a path such as `MODEL.IMAGE_SIZE.0`.

        Raises:
            KeyError: there is no integer at that path.
        """
        value = self._number(path)
        if not isinstance(value, int):
            raise KeyError(path)
        return value

    def size(
        self, paths: Sequence[str], *, default: int | None = None, factor: int | None = None
    ) -> int:
        """Returns what several paths give alike: a number, times a factor and without its fraction.

        Args:
            paths: where the number stands.
            default: the number where a path leads nowhere.
            factor: what it is multiplied by; without one it must be an integer.

        Raises:
            KeyError: there is no number at a path, and no default.
            ContractError: the paths give different numbers.
        """
        found: dict[str, float] = {}
        for path in paths:
            try:
                found[path] = self.integer(path) if factor is None else self._number(path)
            except KeyError:
                if default is None:
                    raise
                found[path] = default
        if len(set(found.values())) > 1:
            raise ContractError(
                "values that must be equal are not: "
                + ", ".join(f"{path} is {value}" for path, value in found.items()),
                where=self.where,
            )
        return int(found[paths[0]] * (1 if factor is None else factor))

    def _number(self, path: str) -> int | float:
        value: JsonValue = dict(self.values)
        for part in path.split("."):
            if isinstance(value, dict):
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                raise KeyError(path)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise KeyError(path)
        return value


def load_config(data: bytes, schema: str, *, where: str) -> Config:
    """Reads and checks the text of a configuration.

    Args:
        data: the whole file, UTF-8, at most 64 KiB.
        schema: the name of its document schema.
        where: what errors call the file.

    Raises:
        InputError: the text is not plain YAML.
        ContractError: keys or values that this project does not support, all of them listed.
    """
    return check_config(parse_yaml(data, where=where), schema, where=where)


def check_config(values: JsonValue, schema: str, *, where: str) -> Config:
    """Checks the values of a configuration; see `load_config`."""
    found = list(faults(values, schema))
    if found:
        lines = [
            f"  {'.'.join(printable(str(part)) for part in f.parts) or 'document'}: {f}"
            for f in found[:_SHOWN]
        ]
        if len(found) > _SHOWN:
            lines.append(f"  and {len(found) - _SHOWN} more")
        raise ContractError(
            "the configuration is not one that this project supports\n" + "\n".join(lines),
            where=where,
        )
    return Config(cast("dict[str, JsonValue]", values), where)


def parse_yaml(data: bytes, *, where: str) -> JsonValue:
    """Returns the value of a small plain YAML document.

    Raises:
        InputError: it is longer than 64 KiB, not UTF-8, malformed, or uses what the module
            docstring names.
    """
    if len(data) > MAX_BYTES:
        raise InputError("the file is too long", where=where, expected=f"at most {MAX_BYTES} bytes")
    try:
        loader = _StrictLoader(data.decode("utf-8"))
        try:
            return cast("JsonValue", loader.get_single_data())
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "malformed text"
        raise InputError(f"this is not plain YAML: {problem}", where=where + line) from error
    except ValueError as error:
        raise InputError(f"this is not plain YAML: {shorten(str(error))}", where=where) from error


class _StrictLoader(yaml.SafeLoader):
    """The safe loader without aliases, tags, merge keys, duplicate keys and deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = cast("Any", self).peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._refuse("anchors and aliases are not supported", event)
        if getattr(event, "tag", None) is not None:
            self._refuse("tags are not supported", event)
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            self._refuse(f"nesting is deeper than {_MAX_DEPTH} levels", event)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                self._refuse("a key is not a plain string", key)
            if key.value in seen:
                self._refuse(f"the key {shorten(key.value)!r} occurs twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        value = float(super().construct_yaml_float(node))
        if math.isnan(value):  # which no bound of a schema would notice
            self._refuse("NaN is not supported", node)
        return value

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value = int(super().construct_yaml_int(node))
        if value.bit_length() > _MAX_INTEGER_BITS:  # which Python may refuse to write as text
            self._refuse("a whole number is too large", node)
        return value

    def _refuse(self, problem: str, at: Any) -> None:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)
_StrictLoader.add_constructor("tag:yaml.org,2002:float", _StrictLoader.construct_yaml_float)

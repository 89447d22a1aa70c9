"""The JSON Schemas (2020-12) of every document, and the validation that names a fault by pointer.

>>> validate({"schema_version": 1}, "sources", where="s.json")
Traceback (most recent call last):
...
sam3d_gguf.schemas.errors.InputError: s.json#/files: the property is missing

A schema lies at `document_schemas/NAME.schema.json` and has the identifier
`urn:sam3d-gguf:schema:NAME`. Three things are stricter than the standard asks: a pattern must match
the whole string (a `$` never matches before a newline), 1.0 is no integer, and every property that
a schema does not name is refused.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend  # pyright: ignore[reportUnknownVariableType] (no types)
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import (
    JsonInput,
    JsonValue,
    dumps,
    loads,
    located,
    shorten,
)

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from jsonschema.protocols import Validator

_SUFFIX = ".schema.json"


def schema_names() -> tuple[str, ...]:
    """Returns the names of all document schemas, sorted."""
    names = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def schema(name: str) -> dict[str, JsonValue]:
    """Returns the document schema of that name."""
    data = (_folder() / f"{name}{_SUFFIX}").read_bytes()
    return cast("dict[str, JsonValue]", loads(data, where=f"{name}{_SUFFIX}"))


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which a document misses its schema: where (keys and indices) and how."""

    parts: tuple[str | int, ...]
    what: str
    expected: str = ""

    def __str__(self) -> str:
        return f"{self.what}; expected {self.expected}" if self.expected else self.what


def faults(value: JsonValue, schema_name: str) -> Iterator[Fault]:
    """Yields every fault of a parsed document."""
    for error in _validator(schema_name).iter_errors(value):
        yield from _faults(error)


def validate(value: JsonValue, schema_name: str, *, where: str) -> None:
    """Checks a parsed document against the schema of that name.

    Raises:
        InputError: the first fault, at its JSON pointer.
    """
    fault = next(faults(value, schema_name), None)
    if fault is not None:
        raise InputError(fault.what, where=located(where, fault.parts), expected=fault.expected)


def encode_document(value: JsonInput, schema_name: str) -> bytes:
    """Returns the text of a document, after reading it back as strictly as anyone else would.

    Raises:
        InputError: the document misses its schema, so that nobody could read it.
    """
    data = dumps(value)
    loads(data, where=schema_name, schema=schema_name, max_bytes=len(data))
    return data


def package_document(package: str, *path: str, schema_name: str) -> Any:
    """Returns a document that ships with this package, loaded strictly and validated.

    Args:
        package: full name of the package that holds the file.
        path: folders and file name inside it.
        schema_name: name of its document schema.

    Raises:
        InputError: the installed file is damaged.
    """
    data = importlib.resources.files(package).joinpath(*path).read_bytes()
    return loads(data, where="/".join(path), schema=schema_name)


def _folder() -> Traversable:
    return importlib.resources.files("sam3d_gguf.schemas") / "document_schemas"


@functools.cache
def _registry() -> Registry[Any]:
    registry = Registry[Any]()
    for name in schema_names():
        contents = schema(name)
        # A schema that names its dialect would be checked by the library's own validator of that
        # dialect, without the three stricter rules.
        del contents["$schema"]
        resource = Resource[Any].from_contents(contents, default_specification=DRAFT202012)
        registry = registry.with_resource(f"urn:sam3d-gguf:schema:{name}", resource)
    return registry


@functools.cache
def _validator(name: str) -> Validator:
    checker = Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer)
    extend_class = cast("Callable[..., type[Validator]]", extend)
    keywords = {"pattern": _whole_pattern}
    strict = extend_class(Draft202012Validator, validators=keywords, type_checker=checker)
    return strict({"$ref": f"urn:sam3d-gguf:schema:{name}"}, registry=_registry())


def _is_integer(_checker: object, instance: object) -> bool:
    return isinstance(instance, int) and not isinstance(instance, bool)


def _whole_pattern(
    _validator: object, pattern: str, instance: object, _schema: object
) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not re.fullmatch(pattern, instance):
        yield ValidationError("the string does not match its pattern")


def _faults(error: ValidationError) -> Iterator[Fault]:
    parts = tuple(error.absolute_path)
    keyword = str(error.validator)
    if keyword == "required":
        # The library gives one error for each, and its name in the message alone: one of the schema's.
        name = error.message.split("'")[1]
        yield Fault((*parts, name), "the property is missing")
    elif keyword in ("additionalProperties", "unevaluatedProperties"):
        for name in _unknown_properties(error):
            yield Fault((*parts, name), "the property is unknown")
    else:
        found = f"the value {shorten(_text(error.instance))} is refused"
        yield Fault(parts, found, _expected(error, keyword))


def _expected(error: ValidationError, keyword: str) -> str:
    """A rule in words: its description where it is a pattern that has one."""
    rules = cast("Mapping[str, object]", error.schema)
    described = str(rules.get("description", "")) if keyword == "pattern" else ""
    rule = error.validator_value
    return described or f"{keyword} {shorten(rule if isinstance(rule, str) else _text(rule))}"


def _text(value: object) -> str:
    """A value as JSON writes it; no key or text of it can look like another line."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _unknown_properties(error: ValidationError) -> Iterator[str]:
    instance = cast("Mapping[str, object]", error.instance)
    rules = cast("Mapping[str, Mapping[str, object]]", error.schema)
    known, patterns = rules.get("properties", {}), rules.get("patternProperties", {})
    for name in instance:
        if name not in known and not any(re.search(p, name) for p in patterns):
            yield name

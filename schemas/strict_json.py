"""JSON that means one thing only: what is ambiguous, oversize or not finite is refused.

>>> loads(b'{"bytes": 12}', where="report.json")
{'bytes': 12}
>>> dumps({"b": 1, "a": [True, None]})
b'{\\n "a": [\\n  true,\\n  null\\n ],\\n "b": 1\\n}\\n'

Refused beyond what RFC 8259 refuses: duplicate keys, NaN and infinities (also by overflow, 1e999),
a byte order mark, lone surrogates, integers that neither int64 nor uint64 holds, number literals of
more than 64 characters, and documents over the bounds on bytes, depth and values. Errors name the
fault by its JSON pointer (RFC 6901). The standard library is all that this module needs.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from sam3d_gguf.schemas.errors import InputError

JsonValue: TypeAlias = "dict[str, JsonValue] | list[JsonValue] | str | int | float | bool | None"
JsonInput: TypeAlias = (
    "Mapping[str, JsonInput] | Sequence[JsonInput] | str | int | float | bool | None"
)

MAX_BYTES = 16 << 20
MAX_DEPTH = 64
MAX_VALUES = 2_000_000
_NUMBER_CHARACTERS = 64
_SHOWN_CHARACTERS = 80

# One string or one structural byte. The string alternative always matches to its closing quote or
# to the end of the data, so that no input makes the scan quadratic.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{},]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class _Fault:
    """Stands in the parsed tree where a value was refused, until its pointer is known."""

    what: str
    key: str | None = None


def json_pointer(parts: Iterable[str | int]) -> str:
    """Returns the RFC 6901 pointer of a path of object keys and array indices; long keys are cut."""
    return "".join("/" + shorten(str(p)).replace("~", "~0").replace("/", "~1") for p in parts)


def shorten(text: str) -> str:
    """Returns text cut to a length that an error message can carry, and to one line."""
    short = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return short.replace("\n", "\\n")


def located(where: str, parts: Iterable[str | int]) -> str:
    """Returns where with the JSON pointer of parts as its fragment; the root adds none."""
    pointer = json_pointer(parts)
    return f"{where}#{pointer}" if pointer else where


def loads(
    data: bytes,
    *,
    where: str,
    schema: str | None = None,
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
) -> JsonValue:
    """Parses one JSON document.

    Args:
        data: the whole document, UTF-8.
        where: what errors call the document.
        schema: name of the document schema that it must meet (see `schemas.documents`), if any.
        max_bytes: longest document accepted.
        max_depth: deepest nesting of arrays and objects accepted.

    Raises:
        InputError: anything that the module docstring names, or a schema fault.
    """
    if len(data) > max_bytes:
        raise InputError(
            f"the document has {len(data)} bytes", where=where, expected=f"at most {max_bytes}"
        )
    text = _decode(data, where)
    _check_structure(data, where, max_depth)
    value = _parse(text, where)
    if _SURROGATE_ESCAPE.search(data):
        _refuse_lone_surrogates(value, where)
    if schema is not None:
        # Imported here because the schema library is absent where this module must still work.
        from sam3d_gguf.schemas.documents import validate

        validate(value, schema, where=where)
    return value


def load_file(
    path: str | os.PathLike[str],
    *,
    schema: str | None = None,
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
) -> JsonValue:
    """Parses the JSON document in a regular file; a symbolic link or anything else is refused.

    Raises:
        InputError: the file cannot be read, is not regular, or its document is refused.
    """
    where = str(path)
    return loads(
        read_regular_file(path, max_bytes=max_bytes),
        where=where,
        schema=schema,
        max_bytes=max_bytes,
        max_depth=max_depth,
    )


def read_regular_file(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Returns the content of a small regular file, opened once and without following a link.

    Raises:
        InputError: it cannot be opened, is a link or not regular, or is longer than max_bytes.
    """
    where = str(path)
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else "this is not a path"
        link = isinstance(error, OSError) and Path(path).is_symlink()
        reason = "is a symbolic link" if link else f"cannot be opened: {said}"
        raise InputError(f"the file {reason}", where=where, expected="a regular file") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InputError("this is not a regular file", where=where)
        with os.fdopen(fd, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(fd)
    if len(data) > max_bytes:
        raise InputError("the file is too long", where=where, expected=f"at most {max_bytes} bytes")
    return data


def dumps(value: JsonInput) -> bytes:
    """Returns the one text of a document: keys sorted, indent 1, ASCII, newline at the end.

    Raises:
        InputError: a float is not finite or a string holds a lone surrogate.
    """
    try:
        text = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False)
    except ValueError as error:
        raise InputError("the document holds a number that is not finite") from error
    data = text.encode("ascii") + b"\n"
    if _SURROGATE_ESCAPE.search(data):
        _refuse_lone_surrogates(cast("JsonValue", value), "document")
    return data


def as_object(value: JsonValue, where: str = "document") -> dict[str, JsonValue]:
    """Returns value as an object, or raises InputError."""
    if not isinstance(value, dict):
        raise InputError(f"this is {_kind(value)}", where=where, expected="an object")
    return value


def as_array(value: JsonValue, where: str = "document") -> list[JsonValue]:
    """Returns value as an array, or raises InputError."""
    if not isinstance(value, list):
        raise InputError(f"this is {_kind(value)}", where=where, expected="an array")
    return value


def as_str(value: JsonValue, where: str = "document") -> str:
    """Returns value as a string, or raises InputError."""
    if not isinstance(value, str):
        raise InputError(f"this is {_kind(value)}", where=where, expected="a string")
    return value


def as_int(value: JsonValue, where: str = "document") -> int:
    """Returns value as an integer (true and false are none), or raises InputError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"this is {_kind(value)}", where=where, expected="an integer")
    return value


def _kind(value: JsonValue) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, str):
        return "a string"
    return "an integer" if isinstance(value, int) else "a number"


def _decode(data: bytes, where: str) -> str:
    if data.startswith(b"\xef\xbb\xbf"):
        raise InputError("the document starts with a byte order mark", where=where, expected="none")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"byte {error.start} is not UTF-8", where=where) from error


def _check_structure(data: bytes, where: str, max_depth: int) -> None:
    """Bounds nesting and the number of values before the parser allocates any of them."""
    depth = values = 0
    for match in _TOKEN.finditer(data):
        byte = data[match.start()]
        if byte in b"[{":
            depth += 1
            if depth > max_depth:
                raise InputError(
                    f"nesting at byte {match.start()} is too deep",
                    where=where,
                    expected=f"at most {max_depth} levels",
                )
        elif byte in b"]}":
            depth -= 1
        values += byte != ord('"')
        if values > MAX_VALUES:
            raise InputError(
                "the document has too many values", where=where, expected=f"at most {MAX_VALUES}"
            )


def _parse(text: str, where: str) -> JsonValue:
    faults: list[_Fault] = []

    def fault(what: str, key: str | None = None) -> _Fault:
        faults.append(_Fault(what, key))
        return faults[-1]

    def integer(literal: str) -> int | _Fault:
        if len(literal) <= 20 and -(1 << 63) <= (number := int(literal)) < 1 << 64:
            return number
        return fault(f"the integer {shorten(literal)} does not fit 64 bits")

    def real(literal: str) -> float | _Fault:
        if len(literal) > _NUMBER_CHARACTERS:
            return fault(f"the number {shorten(literal)} has too many characters")
        number = float(literal)
        return number if math.isfinite(number) else fault(f"the number {literal} overflows")

    def members(pairs: list[tuple[str, object]]) -> dict[str, object] | _Fault:
        result = dict(pairs)
        if len(result) == len(pairs):
            return result
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        return fault(f"the key {shorten(twice)!r} occurs twice", twice)

    try:
        value: object = json.loads(
            text,
            parse_int=integer,
            parse_float=real,
            parse_constant=lambda literal: fault(f"{literal} is not a JSON number"),
            object_pairs_hook=members,
        )
    except json.JSONDecodeError as error:
        raise InputError(
            f"this is not JSON: {error.msg}", where=f"{where} line {error.lineno}:{error.colno}"
        ) from error
    if faults:
        _raise_first_fault(cast("JsonValue", value), where)
    return cast("JsonValue", value)


def _raise_first_fault(root: JsonValue, where: str) -> None:
    for parts, value in _walk(root):
        if isinstance(value, _Fault):
            path = parts if value.key is None else (*parts, value.key)
            raise InputError(value.what, where=located(where, path))


def _refuse_lone_surrogates(root: JsonValue, where: str) -> None:
    for parts, value in _walk(root):
        texts = cast("Iterable[object]", value) if isinstance(value, dict) else (value,)
        for text in texts:
            if isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
                shown = [str(part).encode("ascii", "replace").decode() for part in parts]
                raise InputError("a string holds a lone surrogate", where=located(where, shown))


def _walk(root: JsonValue) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """Yields every value under root with its path, in document order."""
    stack: list[tuple[tuple[str | int, ...], object]] = [((), root)]
    while stack:
        parts, value = stack.pop()
        yield parts, value
        if isinstance(value, dict):
            entries = cast("dict[str, object]", value)
            stack.extend(((*parts, key), entries[key]) for key in reversed(entries))
        elif isinstance(value, (list, tuple)):
            items = cast("Sequence[object]", value)
            stack.extend(((*parts, i), items[i]) for i in reversed(range(len(items))))

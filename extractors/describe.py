"""One line about a value of a pickle, for reports and errors: bounded, printable, never `repr`."""

from __future__ import annotations

from sam3d_gguf.extractors.pickle_machine import Dict, Global, Object, Persistent, Set, Value
from sam3d_gguf.extractors.printable import printable, quoted
from sam3d_gguf.extractors.torch_objects import is_storage, is_tensor


def summary(value: Value) -> tuple[str, str]:
    """Return a value's kind, and its beginning as text."""
    match value:
        case bool() | int() | float() | str() | bytes():
            return type(value).__name__, label(value)
        case None:
            return "None", ""
        case list() | tuple():
            return type(value).__name__, f"of {len(value)}"
        case Set(items=items):
            return "set", f"of {len(items)}"
        case Dict(pairs=pairs):
            return "dict", f"of {len(pairs)}"
        case Global():
            return "global", printable(str(value))
        case Persistent():
            return "storage" if is_storage(value) else "persistent object", ""
        case Object():
            return ("tensor", "") if is_tensor(value) else ("object", f"of {function_name(value)}")


def label(value: Value) -> str:
    """Return a key or scalar as Python writes it, cut to a line's length and ASCII."""
    if isinstance(value, str | bytes):
        return quoted(value)
    if isinstance(value, bool | int | float | None):
        return printable(repr(value))
    return describe(value)


def describe(value: Value) -> str:
    """Return a value's kind and text in one phrase."""
    return " ".join(summary(value)).strip()


def function_name(value: Object) -> str:
    """Return the global that an object calls, where it is one."""
    match value.function:
        case Global() as function:
            return printable(str(function))
        case Persistent(id=("module", Global() as function, *_)):
            return printable(str(function))
        case _:
            return "a computed function"

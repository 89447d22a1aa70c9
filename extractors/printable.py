"""Text of a file in words of ours: ASCII, without control characters, cut to a line's length."""

from __future__ import annotations

_CHARACTERS = 80


def quoted(text: str | bytes) -> str:
    """Return text as Python writes it, in quotes."""
    short = text[:_CHARACTERS]
    return ascii(short) + ("..." if len(text) > len(short) else "")


def printable(text: str) -> str:
    """Return text as Python writes it, without quotes."""
    return ascii(text[:_CHARACTERS])[1:-1] + ("..." if len(text) > _CHARACTERS else "")

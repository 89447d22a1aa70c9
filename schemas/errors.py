"""The one exception family: an error says what, where, what was expected and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Self


class Sam3dError(Exception):
    """A refusal that a user can act on.

    Args:
        what: what is wrong, one sentence without a full stop.
        where: the file, JSON pointer, tensor or byte offset it concerns.
        expected: what would have been right.
        action: what the user can do about it.
    """

    def __init__(self, what: str, *, where: str = "", expected: str = "", action: str = "") -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.action = action
        super().__init__(self._text())

    def _text(self) -> str:
        # A name of a file or tensor must not look like another line of ours.
        where = self.where.replace("\n", "\\n")
        text = f"{where}: {self.what}" if where else self.what
        if self.expected:
            text += f"; expected {self.expected}"
        if self.action:
            text += f". {self.action}"
        return text

    def at(self, where: str) -> Self:
        """The same error with a place before the one that it names, if it names one."""
        place = f"{where}, {self.where}" if self.where else where
        return type(self)(self.what, where=place, expected=self.expected, action=self.action)


class InputError(Sam3dError):
    """An input that is not what it should be: wrong kind, malformed, out of bounds."""


class ContractError(Sam3dError):
    """Tensors or configuration that do not meet the contract."""


class SandboxError(Sam3dError):
    """The sandbox is missing, could not start, or ended a worker that hit a limit."""


class OutputError(Sam3dError):
    """A destination that cannot be written, exists already, or did not read back."""


@contextlib.contextmanager
def within(where: str) -> Generator[None]:
    """Put a place before those that errors name; nothing where it is empty."""
    try:
        yield
    except Sam3dError as error:
        if not where:
            raise
        raise error.at(where) from error

"""How a command starts and ends: descriptors, empty values, and output that can't be written."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import Any, NoReturn, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

FOUND_WRONG = 1
FAILED = 2
UNPRINTED = 3
UNREAD = 128 + signal.SIGPIPE
"""What shells give for a program whose reader went away, which is no fault: nothing is said of it."""


class Command(TyperCommand):
    """A command that is an app of its own."""

    def main(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Any:
        """Parse the arguments and run; always ends with `SystemExit`."""
        given = _started(args)
        return _guarded(lambda: super(Command, self).main(given, *others, **options))


class Group(TyperGroup):
    """An app with subcommands."""

    def main(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Any:
        """Parse the arguments and run; always ends with `SystemExit`."""
        given = _started(args)
        return _guarded(lambda: super(Group, self).main(given, *others, **options))


@contextlib.contextmanager
def printing(*, complete: bool = False) -> Generator[None]:
    """Print the result in this block; `complete` says that its files are there whatever comes.

    Raises:
        typer.Exit: standard output can't be written: `UNPRINTED` where the files are complete,
            else `UNREAD` where its reader went away.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        raise typer.Exit(_unprinted(error, complete=complete)) from error
    except KeyboardInterrupt as error:
        if not complete:
            raise
        say("error: interrupted while the result was printed. The output files are complete")
        raise typer.Exit(UNPRINTED) from error


def say(text: str) -> None:
    """Write to standard error, or nowhere where that can't be written."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


def _started(args: Sequence[str] | None) -> list[str]:
    """The arguments, after what every command needs is in order."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # Whatever the locale, no name that is printed may end the command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if args is None else args)
    _refuse_empty(given)
    return given


def _open_closed_streams() -> None:
    """Take the numbers of standard streams that are closed, so that no file of ours gets them.

    Standard output then fails when it is written, as before; errors go nowhere.
    """
    for fd, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, flags)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w", encoding="utf-8", closefd=False))


def _refuse_empty(args: list[str]) -> None:
    for before, value in pairwise(["", *args]):
        option, sign, rest = value.partition("=")
        if value == "" or (option.startswith("--") and sign and not rest):
            name = option or (before if before.startswith("-") else "an argument")
            say(f"error: {name}: the value is empty")
            raise SystemExit(FAILED)


def _guarded(run: Callable[[], object]) -> NoReturn:
    """Run to the end; help and usage that can't be written are no traceback and no finding."""
    try:
        run()
    except OSError as error:
        raise SystemExit(_unprinted(error, complete=False)) from error
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            # Libraries answer to a reader that goes away with the exit code of a finding.
            raise SystemExit(_unprinted(end.__context__, complete=False)) from None
        raise
    raise SystemExit(0)


def _unprinted(error: OSError, *, complete: bool) -> int:
    """Say that standard output can't be written, unless its reader chose so; the exit code."""
    silence(sys.stdout)
    gone = isinstance(error, BrokenPipeError)
    if not gone:
        rest = ". The output files are complete" if complete else ""
        say(f"error: standard output can't be written: {error.strerror}{rest}")
    if complete:
        return UNPRINTED
    return UNREAD if gone else FAILED


def silence(stream: TextIO) -> None:
    """Let what is left in a stream go nowhere, when the interpreter ends too."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

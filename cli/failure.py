"""How a command that runs a model ends when it cannot go on: one sentence and exit code 2."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from sam3d_gguf.schemas.errors import Sam3dError


@contextmanager
def refusals(*, debug: bool) -> Generator[None]:
    """Turn refusals, Ctrl-C and lack of memory into a message on standard error and exit code 2.

    Args:
        debug: let the exception through, with its traceback.
    """
    try:
        yield
    except (Sam3dError, MemoryError, KeyboardInterrupt) as error:
        if debug:
            raise
        text = str(error)
        if isinstance(error, MemoryError):
            text = "there is too little memory"
        elif isinstance(error, KeyboardInterrupt):
            text = "cancelled"
        Console(stderr=True).print(escape(text), style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error

"""The commands: thin Typer apps over functions that a Python user can call."""

from __future__ import annotations

import sys
from types import TracebackType

_SHOW = sys.excepthook


def _without_interrupts(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """An interrupt while a command is still being imported ends it without a traceback."""
    if not issubclass(kind, KeyboardInterrupt):
        _SHOW(kind, error, trace)


sys.excepthook = _without_interrupts

"""How long work reports on itself, without knowing who listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives what is being done and how many bytes of it are done."""

    def stage(self, title: str, total_bytes: int) -> None:
        """A new stage begins; the one before it has ended."""

    def advance(self, count: int) -> None:
        """`count` more bytes of the stage are done. May be called from any thread."""


class Quiet:
    """Tells nobody."""

    def stage(self, title: str, total_bytes: int) -> None:
        """See `Progress.stage`."""

    def advance(self, count: int) -> None:
        """See `Progress.advance`."""


QUIET: Progress = Quiet()

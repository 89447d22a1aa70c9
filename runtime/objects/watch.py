"""Who follows a run: its stages and steps, their seconds and memory, and a request to stop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Protocol

from sam3d_gguf.runtime.ggml.errors import CancelledError
from sam3d_gguf.runtime.ggml.network import DeviceModel


class Progress(Protocol):
    """Hears of every stage and step as it happens."""

    def stage(self, name: str, steps: int) -> None:
        """A stage begins that has so many steps."""
        ...

    def step(self) -> None:
        """A step of it is done."""
        ...


class _Quiet:
    def stage(self, name: str, steps: int) -> None:
        """Say nothing."""

    def step(self) -> None:
        """Say nothing."""


QUIET: Progress = _Quiet()


@dataclass(slots=True)
class Watch:
    """One run.

    Attributes:
        cancelled: set by who wants the run to stop.
        seconds: wall time by stage, in the order in which they began.
        memory: bytes that a stage's networks held on the device, by stage and kind.
    """

    cancelled: threading.Event
    progress: Progress = QUIET
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    memory: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    @contextlib.contextmanager
    def stage(self, name: str, steps: int) -> Generator[None]:
        """Time a stage.

        Raises:
            CancelledError: the run is to stop.
        """
        self._check(name)
        self.progress.stage(name, steps)
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def step(self, name: str) -> None:
        """A step of a stage is done.

        Raises:
            CancelledError: the run is to stop.
        """
        self.progress.step()
        self._check(name)

    def holds(self, name: str, network: DeviceModel) -> None:
        """Note what a stage's network holds now; the most counts."""
        most = self.memory.setdefault(name, {})
        for kind, size in network.memory().items():
            most[kind] = max(most.get(kind, 0), size)

    def _check(self, name: str) -> None:
        if self.cancelled.is_set():
            raise CancelledError(f"the run was cancelled in the stage {name!r}")

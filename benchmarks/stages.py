"""The time of a program's stages, taken by wrapping the functions that compute them."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import TracebackType
from typing import Any

Stage = str | Callable[..., str | None]


def _nothing() -> None:
    return None


class StageClock:
    """Seconds by stage, each without the stages inside it; off until `start`.

    Args:
        wait: called where a stage starts and ends, so that a device's work counts where it belongs.
    """

    def __init__(self, wait: Callable[[], None] = _nothing) -> None:
        self._wait = wait
        self._running = False
        self._inside: list[_Span] = []
        self._seconds: dict[str, float] = {}

    def start(self) -> None:
        """Forget what was measured, and measure."""
        self._seconds = {}
        self._running = True

    def stop(self) -> dict[str, float]:
        """Measure no more, and give the seconds by stage."""
        self._running = False
        return self._seconds

    def wrap(self, owner: object, name: str, stage: Stage, *, whole: bool = False) -> None:
        """Replace a function or method by one that is measured.

        Args:
            stage: its name, or what tells it from the arguments; None for no stage.
            whole: whether stages inside it count for it.
        """
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            with self._span(stage, whole, arguments, named):
                return function(*arguments, **named)

        setattr(owner, name, measured)

    def _span(
        self, stage: Stage, whole: bool, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> AbstractContextManager[object]:
        hidden = bool(self._inside) and self._inside[-1].whole
        if not self._running or hidden:
            return nullcontext()
        found = stage if isinstance(stage, str) else stage(*arguments, **named)
        return nullcontext() if found is None else _Span(self, found, whole)

    def enter(self, span: "_Span") -> None:
        """Start a stage, and pause the one around it."""
        now = self._now()
        if self._inside:
            self._add(self._inside[-1], now)
        span.since = now
        self._inside.append(span)

    def leave(self) -> None:
        """End the innermost stage."""
        now = self._now()
        self._add(self._inside.pop(), now)
        if self._inside:
            self._inside[-1].since = now

    def _add(self, span: "_Span", now: float) -> None:
        self._seconds[span.stage] = self._seconds.get(span.stage, 0.0) + now - span.since

    def _now(self) -> float:
        self._wait()
        return time.perf_counter()


class _Span:
    """One run of a stage."""

    def __init__(self, clock: StageClock, stage: str, whole: bool) -> None:
        self._clock = clock
        self.stage = stage
        self.whole = whole
        self.since = 0.0

    def __enter__(self) -> None:
        self._clock.enter(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clock.leave()

"""Follow a sandboxed process to its end, keeping little of what it says."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass, field

from sam3d_gguf.schemas.errors import SandboxError

TAIL_BYTES = 64 << 10

_READ_BYTES = 64 << 10
_END_WITHIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Captured:
    """What a process said and how it ended; `status` is negative after a signal."""

    stdout: str
    stderr: str
    ready: bool
    status: int
    timed_out: bool


def readable(data: bytes) -> str:
    """Untrusted output as text, with what is no UTF-8 escaped."""
    return data.decode(errors="backslashreplace")


def capture(process: subprocess.Popen[bytes], *, ready: int, info: int, seconds: float) -> Captured:
    """Wait for the end of bubblewrap and of all that it started; kill it after `seconds`.

    Args:
        process: bubblewrap, with pipes for its output.
        ready: a pipe that gets a byte once the worker is ready.
        info: the pipe of `--info-fd`.
        seconds: wall-clock limit.

    Raises:
        SandboxError: something outlives its own killing.
    """
    assert process.stdout is not None and process.stderr is not None
    out, err = process.stdout.fileno(), process.stderr.fileno()
    with process, selectors.DefaultSelector() as selector, contextlib.ExitStack() as handles:
        watch = _Watch(selector, handles, info)
        watch.add_process(process.pid)
        for fd in (out, err, ready, info):
            watch.add_pipe(fd)
        try:
            timed_out = not watch.follow(seconds)
        finally:
            watch.kill()
            gone = watch.follow(_END_WITHIN_SECONDS)
    if not gone:
        raise SandboxError("the sandbox did not end when it was killed")
    return Captured(
        stdout=readable(watch.tails[out]),
        stderr=readable(watch.tails[err]),
        ready=watch.tails[ready] != b"",
        status=process.returncode,
        timed_out=timed_out,
    )


@dataclass(frozen=True, slots=True)
class _Watch:
    """The pipes that are still open and the processes that still live.

    The last process to end is the first one of the sandbox's own process namespace: it can't be
    gone while any other lives there. bubblewrap tells its number on `info`.
    """

    selector: selectors.BaseSelector
    handles: contextlib.ExitStack
    info: int
    tails: dict[int, bytes] = field(default_factory=dict[int, bytes])
    processes: list[int] = field(default_factory=list[int])

    def add_pipe(self, fd: int) -> None:
        self.tails[fd] = b""
        self.selector.register(fd, selectors.EVENT_READ, self._read)

    def add_process(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(number)
            self.handles.callback(os.close, handle)
            self.processes.append(handle)
            self.selector.register(handle, selectors.EVENT_READ, self.selector.unregister)

    def follow(self, seconds: float) -> bool:
        """Read until all is closed and gone; False if that takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while self.selector.get_map():
            left = deadline - time.monotonic()
            events = self.selector.select(left) if left > 0 else []
            if not events:
                return False
            for key, _ in events:
                key.data(key.fd)
        return True

    def kill(self) -> None:
        for handle in self.processes:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)

    def _read(self, fd: int) -> None:
        data = os.read(fd, _READ_BYTES)
        self.tails[fd] = (self.tails[fd] + data)[-TAIL_BYTES:]
        if not data:
            self.selector.unregister(fd)
            if fd == self.info and self.tails[fd]:
                self.add_process(json.loads(self.tails[fd])["child-pid"])

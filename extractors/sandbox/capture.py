"""Follow a sandboxed process to its end, keeping little of what it says."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from dataclasses import dataclass

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
    """Untrusted output as text, at most the last 64 KiB of it."""
    return data[-TAIL_BYTES:].decode(errors="backslashreplace")


def capture(process: subprocess.Popen[bytes], ready: int | None, seconds: float) -> Captured:
    """Wait for the end of `process`, and of all that holds its output; kill it after `seconds`.

    Args:
        process: started with pipes for its output.
        ready: a pipe that gets a byte once the process is ready; it is closed here.
        seconds: wall-clock limit.

    Raises:
        SandboxError: something of it outlives its own killing.
    """
    assert process.stdout is not None and process.stderr is not None
    out, err = process.stdout.fileno(), process.stderr.fileno()
    tails = {out: b"", err: b""} | ({ready: b""} if ready is not None else {})
    with process, selectors.DefaultSelector() as selector:
        for fd in tails:
            selector.register(fd, selectors.EVENT_READ)
        try:
            timed_out = not _follow(selector, tails, process, time.monotonic() + seconds)
            if timed_out:
                process.kill()
                if not _follow(selector, tails, process, time.monotonic() + _END_WITHIN_SECONDS):
                    raise SandboxError("the sandbox did not end when it was killed")
        finally:
            process.kill()
            if ready is not None:
                os.close(ready)
    return Captured(
        stdout=readable(tails[out]),
        stderr=readable(tails[err]),
        ready=ready is not None and tails[ready] != b"",
        status=process.returncode,
        timed_out=timed_out,
    )


def _follow(
    selector: selectors.BaseSelector,
    tails: dict[int, bytes],
    process: subprocess.Popen[bytes],
    deadline: float,
) -> bool:
    """Read until all is closed and the process is gone; False at the deadline."""
    while selector.get_map():
        events = selector.select(max(0.0, deadline - time.monotonic()))
        if not events or time.monotonic() >= deadline:
            return False
        for key, _ in events:
            data = os.read(key.fd, _READ_BYTES)
            tails[key.fd] = (tails[key.fd] + data)[-TAIL_BYTES:]
            if not data:
                selector.unregister(key.fd)
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True

"""The exit statuses that say which limit or wall ended a worker. They are the worker's own word."""

from __future__ import annotations

import signal

from sam3d_gguf.extractors.sandbox.job import EndedBy

NO_START = 121
NO_MEMORY = 122
NO_SPACE = 123
LARGE_FILE = 124
OTHER_SOURCE = 125

AFTER_SIGNAL = 128

_ENDINGS: dict[int, EndedBy] = {
    NO_MEMORY: "memory",
    NO_SPACE: "disk space",
    LARGE_FILE: "file size",
    AFTER_SIGNAL + signal.SIGXCPU: "time",
    AFTER_SIGNAL + signal.SIGSYS: "forbidden system call",
}


def ended_by(status: int) -> EndedBy | None:
    """What ended a worker with this exit status; None: it ended by itself."""
    if status in _ENDINGS:
        return _ENDINGS[status]
    return "signal" if status > AFTER_SIGNAL else None

"""Runs commands in forks of a process that has imported them already, and interrupts them.

Reads one JSON request a line from standard input: {"arguments": [command, ...], "seconds": after
which to interrupt or null, "signal": number}. Answers each with {"code": exit code, or minus the
signal's number, "seconds": how long it took, "err": standard error}.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from sam3d_gguf.cli import convert, extract, verify

APPS = {"sam3d-convert": convert.app, "sam3d-extract": extract.app, "sam3d-verify": verify.app}


def become(arguments: list[str], err: int) -> NoReturn:
    """Run a command as its entry point does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(err, 2)
    code = 99
    try:
        APPS[arguments[0]](arguments[1:], prog_name=arguments[0])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Run one command, and interrupt it."""
    with tempfile.TemporaryFile() as err:
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            become(request["arguments"], err.fileno())
        process = os.pidfd_open(pid)
        seconds = request["seconds"]
        ended, _, _ = select.select([process], [], [], seconds)
        if not ended:
            signal.pidfd_send_signal(process, request["signal"])
        _, status = os.waitpid(pid, 0)
        os.close(process)
        err.seek(0)
        return {
            "code": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - started,
            "err": err.read().decode(errors="replace"),
        }


def main() -> None:
    """Serve until standard input ends."""
    # Whatever is loaded on first use, before the first fork.
    warm = Path(tempfile.mkdtemp())
    serve({"arguments": ["sam3d-verify", str(warm / "none")], "seconds": None, "signal": 0})
    warm.rmdir()
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

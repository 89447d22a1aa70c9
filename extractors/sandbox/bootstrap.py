"""The first code of ours inside the sandbox: limits, imports, the filter, then the worker.

The interpreter is started as `python -I -B -c ENTRY SPEC`, where SPEC is the JSON of `Spec`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import math
import os
import resource
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NoReturn, cast

from sam3d_gguf.extractors.sandbox.ending import (
    LARGE_FILE,
    NO_MEMORY,
    NO_SPACE,
    NO_START,
    OTHER_SOURCE,
)
from sam3d_gguf.extractors.sandbox.job import WorkerJob
from sam3d_gguf.extractors.sandbox.lockdown import lock_down

PACKAGES = "/packages"
OUTPUT = "/out"
SOURCE = "/in/source"

ENTRY = f"""
import sys
if sys.version_info < (3, 11):
    sys.stderr.write("Python is older than 3.11")
    sys.exit({NO_START})
sys.path.insert(0, {PACKAGES!r})
from sam3d_gguf.extractors.sandbox.bootstrap import main
main(sys.argv[1])
"""

_OPEN_FILES = 64
_KILL_AFTER = 5

_ENDINGS = {
    errno.ENOMEM: NO_MEMORY,
    errno.EFBIG: LARGE_FILE,
    errno.ENOSPC: NO_SPACE,
    errno.EDQUOT: NO_SPACE,
}

Worker = Callable[[int, str, list[str]], int]


@dataclass(frozen=True, slots=True)
class Spec:
    """What the host tells the bootstrap.

    Args:
        module, arguments: the worker.
        memory_bytes, file_bytes, seconds, processes: limits; no `processes` where the sandbox
            counts them itself.
        source_fd: the inherited source; None: open `SOURCE`.
        identity: device and inode that the source must have.
        ready_fd: gets one byte once the walls stand.
        lifeline: end as soon as standard input does.
    """

    module: str
    arguments: list[str]
    memory_bytes: int
    file_bytes: int
    seconds: int
    processes: int | None
    source_fd: int | None
    identity: list[int]
    ready_fd: int | None
    lifeline: bool

    def encode(self) -> str:
        """The form that `main` takes."""
        return json.dumps(asdict(self))


def specify(job: WorkerJob, *, source_fd: int | None = None, ready_fd: int | None = None) -> Spec:
    """What the bootstrap must know of a job.

    Without `source_fd` it is meant for a container, which counts processes itself, and outlives
    the caller unless its standard input tells it.
    """
    source = os.fstat(job.source_fd)
    contained = source_fd is None
    return Spec(
        module=job.module,
        arguments=list(job.arguments),
        memory_bytes=job.limits.memory_bytes,
        file_bytes=job.limits.file_bytes,
        seconds=math.ceil(job.limits.seconds),
        processes=None if contained else job.limits.processes,
        source_fd=source_fd,
        identity=[source.st_dev, source.st_ino],
        ready_fd=ready_fd,
        lifeline=contained,
    )


def main(text: str) -> NoReturn:
    """Run the worker that `text` (a `Spec`) asks for, and exit with its status."""
    spec = Spec(**json.loads(text))
    try:
        worker, source_fd = _prepare(spec)
    except Exception:  # noqa: BLE001 - whatever it is, the host must not take it for the worker's end
        traceback.print_exc()
        _leave(NO_START)
    try:
        status = worker(source_fd, OUTPUT, spec.arguments)
    except (MemoryError, OSError) as error:
        if (ending := _ending(error)) is None:
            raise
        _leave(ending)
    sys.exit(status)


def _ending(error: MemoryError | OSError) -> int | None:
    return NO_MEMORY if isinstance(error, MemoryError) else _ENDINGS.get(error.errno or 0)


def _leave(status: int) -> NoReturn:
    with contextlib.suppress(MemoryError, OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _prepare(spec: Spec) -> tuple[Worker, int]:
    _limit(spec)
    if spec.lifeline:
        threading.Thread(target=_end_with_input, daemon=True).start()
    # One thread of a library is enough, and its buffers for each processor would fill the memory.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    worker = cast(Worker, importlib.import_module(spec.module).main)
    os.environ.clear()
    source_fd = _open_source(spec)
    lock_down()
    if spec.ready_fd is not None:
        os.write(spec.ready_fd, b"1")
        os.close(spec.ready_fd)
    return worker, source_fd


def _limit(spec: Spec) -> None:
    limits = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_AS: (spec.memory_bytes, spec.memory_bytes),
        resource.RLIMIT_FSIZE: (spec.file_bytes, spec.file_bytes),
        resource.RLIMIT_NOFILE: (_OPEN_FILES, _OPEN_FILES),
        resource.RLIMIT_CPU: (spec.seconds, spec.seconds + _KILL_AFTER),
    }
    if spec.processes is not None:
        limits[resource.RLIMIT_NPROC] = (spec.processes, spec.processes)
    for kind, (soft, hard) in limits.items():
        most = resource.getrlimit(kind)[1]  # which this process may already have, and can't raise
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _open_source(spec: Spec) -> int:
    fd = spec.source_fd
    if fd is None:
        fd = os.open(SOURCE, os.O_RDONLY)
    state = os.fstat(fd)
    if [state.st_dev, state.st_ino] != spec.identity:
        _leave(OTHER_SOURCE)
    return fd

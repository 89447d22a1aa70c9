"""What a worker is asked to do, what it may use, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import sam3d_gguf
from sam3d_gguf.schemas.errors import SandboxError

SandboxKind = Literal["bubblewrap", "docker"]
EndedBy = Literal["memory", "time", "file size", "disk space", "forbidden system call", "signal"]

DEFAULT_MODULE = "sam3d_gguf.extractors.worker"


@dataclass(frozen=True, slots=True)
class SandboxChoice:
    """Which sandbox runs the worker.

    Args:
        kind: `bubblewrap`, or `docker`.
        base: for Docker only, an image with Python 3.11 or newer and NumPy. It is resolved to its
            ID, and the ID is what runs and what `WorkerResult.sandbox` names. None: the one that
            image.json pins, where it does.
    """

    kind: SandboxKind = "bubblewrap"
    base: str | None = None


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What a worker may use.

    Args:
        memory_bytes: address space, with the interpreter and NumPy in it (about 200 MiB).
        file_bytes: size of each file it writes.
        seconds: wall-clock time, and processor time.
        processes: processes and threads together, those that start the worker included.
    """

    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 30
    seconds: float = 3600.0
    processes: int = 16


@dataclass(frozen=True, slots=True)
class Package:
    """A file or folder of the host that the worker can read and import.

    Args:
        name: where it appears below the worker's import path, such as `sam3d_gguf/extractors`.
        path: where it is on the host; links are followed.
    """

    name: str
    path: Path


def own_packages() -> tuple[Package, ...]:
    """The parts of this distribution that a worker needs, and nothing else of it."""
    root = Path(sam3d_gguf.__path__[0])
    names = ("__init__.py", "extractors", "schemas")
    return tuple(Package(f"sam3d_gguf/{name}", (root / name).resolve()) for name in names)


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """One run of a worker on one source.

    Args:
        source_fd: the source, open for reading only. bubblewrap hands this descriptor on.
        source_path: the path that `source_fd` was opened by. Docker mounts it read-only; the worker
            does not start if it is another file by then.
        output: a folder of the caller with nothing but the empty files that the worker may write;
            it can make no others. While the worker runs it must be left alone, and when root calls
            it belongs to another user meanwhile.
        module: the worker, see the package's docstring for its `main`.
        arguments: handed to `main` as they are.
        limits: what it may use.
        packages: what it can import besides the standard library and NumPy.
    """

    source_fd: int
    source_path: Path
    output: Path
    module: str = DEFAULT_MODULE
    arguments: tuple[str, ...] = ()
    limits: SandboxLimits = SandboxLimits()
    packages: tuple[Package, ...] = field(default_factory=own_packages)


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """How a worker ended.

    Args:
        exit_status: what `main` returned; 128 + the signal's number after a signal.
        stdout: the last 64 KiB of its output, undecodable bytes escaped or replaced. Untrusted.
        stderr: the same of its errors. Untrusted.
        ended_by: the limit or wall that ended it, None when it ended by itself.
        seconds: wall-clock time, the sandbox's own start included.
        sandbox: what ran it, such as `bubblewrap 0.8.0` or `docker sha256:...`.
        limits: what it was allowed to use.
    """

    exit_status: int
    stdout: str
    stderr: str
    ended_by: EndedBy | None
    seconds: float
    sandbox: str
    limits: SandboxLimits

    def raise_for_end(self, *, where: str = "") -> None:
        """Raise if a limit or a wall ended the worker; a full disk is neither.

        Raises:
            SandboxError: says which one and how far it reached. `where` names the source.
        """
        if self.ended_by is not None and self.ended_by in _ENDS:
            what = _ENDS[self.ended_by](self)
            raise SandboxError(
                f"the sandbox ended its reader: {what}",
                where=where,
                action="The file is malformed or hostile, or larger than the limit allows for",
            )


_ENDS: dict[EndedBy, Callable[[WorkerResult], str]] = {
    "memory": lambda end: f"it needs more than {end.limits.memory_bytes} bytes of memory",
    "time": lambda end: f"it takes longer than {end.limits.seconds:g} seconds",
    "file size": lambda end: f"it writes a file of more than {end.limits.file_bytes} bytes",
    "forbidden system call": lambda end: "it tried a system call that no reader needs",
    "signal": lambda end: f"signal {end.exit_status - 128}",
}

"""The entry points: find the chosen sandbox, try it, run a worker in it."""

from __future__ import annotations

import fcntl
import os
import platform
from typing import Protocol

from sam3d_gguf.extractors.sandbox import bubblewrap
from sam3d_gguf.extractors.sandbox.job import SandboxChoice, WorkerJob, WorkerResult
from sam3d_gguf.extractors.sandbox.lockdown import ARCHITECTURES
from sam3d_gguf.schemas.errors import SandboxError


class Sandbox(Protocol):
    """A sandbox that has been found and tried."""

    @property
    def name(self) -> str:
        """What it is, for reports: `bubblewrap 0.8.0`, `docker sha256:...`."""
        ...

    def check(self) -> None:
        """Start an empty process in it."""
        ...

    def run(self, job: WorkerJob) -> WorkerResult:
        """Run one worker to its end."""
        ...


def check_sandbox(choice: SandboxChoice) -> str:
    """Find the sandbox and start an empty process in it.

    Returns:
        its name, as `WorkerResult.sandbox`.

    Raises:
        SandboxError: it is missing or restricted here; says why and how to mend it.
    """
    sandbox = _open(choice)
    sandbox.check()
    return sandbox.name


def require_sandbox(choice: SandboxChoice) -> None:
    """Find the sandbox, without starting anything in it.

    Raises:
        SandboxError: it is missing; says how to get it.
    """
    _open(choice)


def run_worker(job: WorkerJob, choice: SandboxChoice) -> WorkerResult:
    """Run a worker to its end; nothing of it is left running, whatever happens here.

    Raises:
        SandboxError: the sandbox is missing or restricted, or the worker could not start in it.
            A worker that started and then failed is no exception: see `WorkerResult`.
    """
    if fcntl.fcntl(job.source_fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
        raise SandboxError("the source must be open for reading only", where=str(job.source_path))
    return _open(choice).run(job)


def _open(choice: SandboxChoice) -> Sandbox:
    if platform.machine() not in ARCHITECTURES:
        raise SandboxError(
            f"no system call filter for {platform.machine()} machines",
            expected=" or ".join(ARCHITECTURES),
        )
    if choice.kind == "bubblewrap":
        return bubblewrap.find()
    # Only here: the client takes longer to import than a sandbox to start.
    from sam3d_gguf.extractors.sandbox import containers

    return containers.find(choice.base)

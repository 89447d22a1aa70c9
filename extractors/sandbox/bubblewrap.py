"""Run a worker in bubblewrap, 0.8.0 (Debian 12) or newer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sam3d_gguf.extractors.sandbox import bootstrap, launch
from sam3d_gguf.extractors.sandbox.capture import Captured, capture
from sam3d_gguf.extractors.sandbox.ending import AFTER_SIGNAL, ended_by
from sam3d_gguf.extractors.sandbox.handover import UNPRIVILEGED, handed_over
from sam3d_gguf.extractors.sandbox.interpreter import Interpreter, running_interpreter
from sam3d_gguf.extractors.sandbox.job import Package, WorkerJob, WorkerResult
from sam3d_gguf.extractors.sandbox.restrictions import explain
from sam3d_gguf.schemas.errors import SandboxError

WALLS = (
    "--unshare-user",
    "--disable-userns",
    "--unshare-pid",
    "--unshare-net",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-cgroup-try",
    "--die-with-parent",
    "--new-session",
    "--cap-drop",
    "ALL",
    "--clearenv",
    "--uid",
    str(UNPRIVILEGED),
    "--gid",
    str(UNPRIVILEGED),
    "--hostname",
    "sandbox",
)

_PYTHON_OPTIONS = ("-I", "-S", "-B", "-X", "utf8")
_CHECK_SECONDS = 60.0

Bind = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """An installed bubblewrap."""

    path: str
    version: str

    @property
    def name(self) -> str:
        """`bubblewrap` and its version."""
        return f"bubblewrap {self.version}"

    def check(self) -> None:
        """Start an empty process behind the walls.

        Raises:
            SandboxError: they can't be raised here.
        """
        interpreter = running_interpreter()
        process = self._start(interpreter, view(interpreter, ()), ["-c", ""], ())
        captured = capture(process, None, _CHECK_SECONDS)
        if captured.status != 0:
            raise explain(captured.stderr)

    def run(self, job: WorkerJob) -> WorkerResult:
        """Run one worker to its end.

        Raises:
            SandboxError: it could not start.
        """
        interpreter = running_interpreter()
        started = time.monotonic()
        with handed_over(job.output):
            captured = self._run(job, interpreter)
        if not captured.ready and not captured.timed_out:
            raise explain(captured.stderr)
        status = captured.status if captured.status >= 0 else AFTER_SIGNAL - captured.status
        return WorkerResult(
            exit_status=status,
            stdout=captured.stdout,
            stderr=captured.stderr,
            ended_by="time" if captured.timed_out else ended_by(status),
            seconds=time.monotonic() - started,
            sandbox=self.name,
            limits=job.limits,
        )

    def _run(self, job: WorkerJob, interpreter: Interpreter) -> Captured:
        binds = view(interpreter, job.packages)
        binds.append(("--bind", str(job.output.resolve()), bootstrap.OUTPUT))
        ready, ready_in_worker = os.pipe()
        try:
            spec = bootstrap.specify(job, source_fd=job.source_fd, ready_fd=ready_in_worker)
            command = ["-c", bootstrap.ENTRY, spec.encode()]
            handles = (job.source_fd, ready_in_worker)
            process = self._start(interpreter, binds, command, handles)
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(ready_in_worker)
        return capture(process, ready, job.limits.seconds)

    def _start(
        self,
        interpreter: Interpreter,
        binds: list[Bind],
        command: Sequence[str],
        handles: tuple[int, ...],
    ) -> subprocess.Popen[bytes]:
        after: list[str] = []
        for folder in interpreter.hidden:
            after += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
        directories = dict.fromkeys(str(library.parent) for library in interpreter.libraries)
        after += ["--setenv", "LD_LIBRARY_PATH", ":".join(directories)]
        after += ["--remount-ro", "/", "--chdir", "/", "--"]
        after += [str(interpreter.executable), *_PYTHON_OPTIONS, *command]
        plan = launch.Launch(
            before=[self.path, *WALLS],
            binds=binds,
            after=after,
            user=UNPRIVILEGED if os.geteuid() == 0 else None,
            parent=os.getpid(),
        )
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", launch.__file__, plan.encode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=handles,
            env={},
            cwd="/",
            start_new_session=True,
        )


def view(interpreter: Interpreter, packages: Sequence[Package]) -> list[Bind]:
    """All that the worker sees, read-only: the interpreter, its libraries, NumPy, `packages`."""
    same = (interpreter.stdlib, interpreter.executable, *interpreter.libraries)
    binds = [("--ro-bind", str(path), str(path)) for path in same]
    for package in (*interpreter.numpy, *packages):
        place = f"{bootstrap.PACKAGES}/{package.name}"
        binds.append(("--ro-bind", str(package.path), place))
    return binds


def find() -> Bubblewrap:
    """The bubblewrap on the PATH.

    Raises:
        SandboxError: there is none.
    """
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxError(
            "bubblewrap is not installed, and legacy files are only read in a sandbox",
            expected="the command bwrap, version 0.8.0 or newer",
            action=(
                "Install it: sudo apt-get install bubblewrap. "
                "Or use Docker: --sandbox docker --base IMAGE"
            ),
        )
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return Bubblewrap(os.path.realpath(path), said.stdout.strip().removeprefix("bubblewrap "))

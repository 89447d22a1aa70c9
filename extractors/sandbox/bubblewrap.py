"""Run a worker in bubblewrap, 0.8.0 (Debian 12) or newer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
        captured = self._run([], lambda _: ["-c", ""], (), _CHECK_SECONDS)
        if captured.status != 0:
            raise explain(captured.stderr)

    def run(self, job: WorkerJob) -> WorkerResult:
        """Run one worker to its end.

        Raises:
            SandboxError: it could not start.
        """

        def command(ready: int) -> list[str]:
            spec = bootstrap.specify(job, source_fd=job.source_fd, ready_fd=ready)
            return ["-c", bootstrap.ENTRY, spec.encode()]

        binds = _packages(job.packages)
        binds.append(("--bind", str(job.output.resolve()), bootstrap.OUTPUT))
        started = time.monotonic()
        with handed_over(job.output):
            captured = self._run(binds, command, (job.source_fd,), job.limits.seconds)
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

    def _run(
        self,
        binds: list[Bind],
        command: Callable[[int], list[str]],
        inherited: tuple[int, ...],
        seconds: float,
    ) -> Captured:
        """Run Python with the arguments that `command` makes of the descriptor to report to."""
        with ExitStack() as ours:
            with ExitStack() as theirs:
                ready, ready_in_worker = _pipe(ours, theirs)
                info, info_in_bubblewrap = _pipe(ours, theirs)
                process = self._start(
                    ["--info-fd", str(info_in_bubblewrap)],
                    binds,
                    command(ready_in_worker),
                    (*inherited, ready_in_worker, info_in_bubblewrap),
                )
            return capture(process, ready=ready, info=info, seconds=seconds)

    def _start(
        self,
        options: list[str],
        binds: list[Bind],
        command: list[str],
        inherited: tuple[int, ...],
    ) -> subprocess.Popen[bytes]:
        python = running_interpreter()
        plan = launch.Launch(
            before=[self.path, *WALLS, *options],
            binds=[*_view(python), *binds],
            after=[*_finish(python), "--", str(python.executable), *_PYTHON_OPTIONS, *command],
            user=UNPRIVILEGED if os.geteuid() == 0 else None,
            parent=os.getpid(),
        )
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", launch.__file__, plan.encode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=inherited,
            env={},
            cwd="/",
            start_new_session=True,
        )


def _pipe(ours: ExitStack, theirs: ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe()
    ours.callback(os.close, reader)
    theirs.callback(os.close, writer)
    return reader, writer


def _view(python: Interpreter) -> list[Bind]:
    """What every worker sees, read-only: the interpreter, its libraries, and NumPy."""
    same = (python.stdlib, python.executable, *python.libraries)
    return [("--ro-bind", str(path), str(path)) for path in same] + _packages(python.numpy)


def _packages(packages: Sequence[Package]) -> list[Bind]:
    places = [(str(package.path), f"{bootstrap.PACKAGES}/{package.name}") for package in packages]
    return [("--ro-bind", path, place) for path, place in places]


def _finish(python: Interpreter) -> list[str]:
    """The options after the binds: cover what is too much, let the loader find the libraries."""
    options: list[str] = []
    for folder in python.hidden:
        options += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
    folders = dict.fromkeys(str(library.parent) for library in python.libraries)
    options += ["--setenv", "LD_LIBRARY_PATH", ":".join(folders)]
    return [*options, "--remount-ro", "/", "--chdir", "/"]


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

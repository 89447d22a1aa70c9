"""Run a command and measure it: wall time, and the memory of its whole process tree."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERVAL_SECONDS = 0.05
KIBIBYTE = 1024


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a command took.

    `peak_anonymous_bytes` and `peak_resident_bytes` are the largest sums over the process tree seen
    at 20 samples a second. Anonymous counts RssAnon and RssShmem, which can't be dropped or written
    back to a file; resident counts page-cache pages of mapped files too.
    """

    wall_seconds: float
    peak_anonymous_bytes: int
    peak_resident_bytes: int


def run(command: Sequence[str | Path]) -> Measurement:
    """Run a command to its end.

    Raises `subprocess.CalledProcessError` if it fails.
    """
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    sampler = _Sampler(process.pid)
    sampler.start()
    code = process.wait()
    wall = time.perf_counter() - started
    sampler.stop()
    if code != 0:
        raise subprocess.CalledProcessError(code, [str(part) for part in command])
    return Measurement(wall, sampler.peak_anonymous, sampler.peak_resident)


class _Sampler(threading.Thread):
    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self._root = root
        self._stopped = threading.Event()
        self.peak_anonymous = 0
        self.peak_resident = 0

    def run(self) -> None:
        while not self._stopped.wait(INTERVAL_SECONDS):
            samples = [_memory(pid) for pid in _tree(self._root)]
            self.peak_anonymous = max(self.peak_anonymous, sum(row[0] for row in samples))
            self.peak_resident = max(self.peak_resident, sum(row[1] for row in samples))

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _tree(root: int) -> Iterator[int]:
    """The process and its descendants, those in other PID namespaces included."""
    pending = [root]
    while pending:
        pid = pending.pop()
        yield pid
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                pending.extend(int(child) for child in children.read_text().split())


def _memory(pid: int) -> tuple[int, int]:
    """Anonymous and resident bytes of one process; zeros if it has ended."""
    fields = _status(pid)
    sizes = {
        name: int(fields.get(name, "0 kB").split()[0]) * KIBIBYTE
        for name in ("RssAnon", "RssShmem", "VmRSS")
    }
    return sizes["RssAnon"] + sizes["RssShmem"], sizes["VmRSS"]


def _status(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def machine() -> dict[str, str | int]:
    """The facts about this machine that figures depend on; nothing that names it."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith(("model name", "Model"))
        ),
        "unknown",
    )
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": os.uname().release.split("-")[0],
        "architecture": os.uname().machine,
    }

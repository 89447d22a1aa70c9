"""Memory and threads of this machine that libggml will get, asked for before it does.

libggml ends the process where a small allocation or a thread is refused to it. So both are tried
here first, where a refusal is an error.
"""

from __future__ import annotations

import mmap
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

from sam3d_gguf.runtime.ggml.errors import BackendError

HEADROOM = 64 << 20
"""Bytes that must be free when libggml builds or computes a graph: its contexts and work buffers."""

BLAS_THREAD = 144 << 20
"""Bytes for each thread of OpenBLAS. Refused, it asks again and again, and never ends.

Its buffer is 32 << 22 bytes on x86-64 (OpenBLAS, `common_x86_64.h`), less elsewhere.
"""

BLAS_LIBRARY = 2 * BLAS_THREAD
"""Bytes of address space that loading OpenBLAS takes, with its first buffer."""

_NO_LIMIT = 1 << 62
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self")
_FILE_CACHE = ("active_file", "inactive_file")
_ACTION = "Free memory, or raise the limit of this process (ulimit -v, the container's)."


def available_memory() -> int:
    """Bytes that this process can still allocate without swapping.

    The smallest of the kernel's estimate, the process's limit of address space, and the limits of
    its control groups.
    """
    return max(0, min(_machine(), _address_space(), *_control_groups()))


def check_available(size: int, purpose: str) -> None:
    """Refuses what is larger than the memory that is available.

    Raises:
        BackendError: fewer bytes are.
    """
    free = available_memory()
    if size > free:
        raise BackendError(
            f"{purpose} need {size / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are free",
            action="Give fewer at a time, or free memory.",
        )


def require_memory(size: int, purpose: str) -> None:
    """Checks that so many bytes can be allocated now.

    Raises:
        BackendError: they can't.
    """
    try:
        mmap.mmap(-1, size + mmap.PAGESIZE).close()
    except (OSError, OverflowError, ValueError) as error:
        raise BackendError(
            f"there is no memory for {purpose}, {size / 2**20:.0f} MiB", action=_ACTION
        ) from error


def require_threads(count: int) -> None:
    """Checks that so many threads can run at once, beside the one that calls.

    Raises:
        BackendError: they can't.
    """
    done = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=done.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError) as error:
        raise BackendError(
            f"{count + 1} threads can't be started here, {len(started) + 1} can",
            action="Ask for fewer threads, or raise the limits of this process (ulimit -u, -v).",
        ) from error
    finally:
        done.set()
        for thread in started:
            thread.join()


def _machine() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _NO_LIMIT


def _address_space() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return _NO_LIMIT
    pages = int((_PROCESS / "statm").read_text(encoding="ascii").split()[0])
    return limit - pages * mmap.PAGESIZE


def _control_groups() -> Iterator[int]:
    """What is free in this process's control group (version 2) and in each that it is part of."""
    yield _NO_LIMIT
    try:
        lines = (_PROCESS / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if own is None:
        return
    folder = _CONTROL_GROUPS / own.lstrip("/")
    while folder.is_relative_to(_CONTROL_GROUPS):
        yield _free_in(folder)
        folder = folder.parent


def _free_in(folder: Path) -> int:
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        counts = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return _NO_LIMIT
    if limit == "max":
        return _NO_LIMIT
    cached = sum(int(n) for name, n in (line.split() for line in counts) if name in _FILE_CACHE)
    return int(limit) - used + cached

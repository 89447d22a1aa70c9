"""Memory and threads of this machine that libggml will get, asked for before it does.

libggml ends the process where a small allocation or a thread is refused to it. So both are tried
here first, where a refusal is an error.
"""

from __future__ import annotations

import mmap
import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """Names of a control group's files, and of the page cache in its memory.stat."""

    limit: str
    used: str
    cached: tuple[str, ...]


_VERSION_1 = _GroupFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)
_VERSION_2 = _GroupFiles("memory.max", "memory.current", ("active_file", "inactive_file"))
_NO_LIMIT = 1 << 62
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self")
_ACTION = "Free memory, or raise the limit of this process (ulimit -v, the container's)."


def available_memory() -> int:
    """Bytes that this process can still allocate without swapping.

    The smallest of the kernel's estimate, the process's limit of address space, and the limits of
    its control groups (versions 1 and 2).
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
    """What is free in this process's control groups and in each that they are part of."""
    yield _NO_LIMIT
    try:
        lines = (_PROCESS / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            yield from _upwards(_CONTROL_GROUPS, own, _VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _upwards(_CONTROL_GROUPS / "memory", own, _VERSION_1)


def _upwards(root: Path, own: str, names: _GroupFiles) -> Iterator[int]:
    """From a group to the root; in a container groups outside it have no folder here."""
    folder = root / own.lstrip("/")
    while folder.is_relative_to(root):
        yield _free_in(folder, names)
        folder = folder.parent


def _free_in(folder: Path, names: _GroupFiles) -> int:
    try:
        text = (folder / names.limit).read_text(encoding="ascii").strip()
        used = int((folder / names.used).read_text(encoding="ascii"))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return _NO_LIMIT
    counts = {name: int(count) for name, count in (line.split() for line in lines)}
    # Version 1 gives here the least limit of the groups around it too, which may have no folder.
    around = counts.get("hierarchical_memory_limit", _NO_LIMIT)
    limit = min(around, _NO_LIMIT if text == "max" else int(text))
    if limit >= _NO_LIMIT:
        return _NO_LIMIT
    return limit - used + sum(counts.get(name, 0) for name in names.cached)

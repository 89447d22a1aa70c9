"""How many processor cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def usable_cores(cpus: Path = _CPUS) -> int:
    """Returns the number of cores, where hardware threads of one core count once.

    Products keep a core busy with one thread; a second one on it waits, and slows the first.

    Args:
        cpus: Linux's folder of processors (Documentation/ABI/stable/sysfs-devices-system-cpu).
    """
    usable = os.sched_getaffinity(0)
    try:
        return len({_core(cpus / f"cpu{number}" / "topology") for number in usable})
    except OSError:
        return len(usable)


def _core(topology: Path) -> tuple[str, str]:
    package = (topology / "physical_package_id").read_text("ascii").strip()
    return package, (topology / "core_id").read_text("ascii").strip()

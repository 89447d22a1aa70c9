"""Why bubblewrap could not raise its walls here, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sam3d_gguf.schemas.errors import SandboxError

_MANUAL = "docs/sandbox.md has the details; --sandbox docker --base IMAGE is the other way"


@dataclass(frozen=True, slots=True)
class _Restriction:
    """A kernel setting, the value that denies user namespaces, and the cure."""

    setting: str
    denies: str
    what: str
    action: str


_RESTRICTIONS = (
    _Restriction(
        "proc/sys/kernel/unprivileged_userns_clone",
        "0",
        "this kernel denies user namespaces to ordinary users",
        "Allow them: sudo sysctl kernel.unprivileged_userns_clone=1",
    ),
    _Restriction(
        "proc/sys/user/max_user_namespaces",
        "0",
        "this system allows no user namespaces",
        "Allow them: sudo sysctl user.max_user_namespaces=15000",
    ),
    _Restriction(
        "proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor denies user namespaces to bubblewrap (the default of Ubuntu 24.04)",
        "Give bubblewrap the AppArmor profile of docs/sandbox.md",
    ),
)

_CONTAINER_MARKS = (".dockerenv", "run/.containerenv")
_NAMESPACE_WORDS = ("namespace", "uid map", "gid map", "loopback", "unshare", "setgroups")


def explain(stderr: str, root: Path = Path("/")) -> SandboxError:
    """The error for a bubblewrap, or a worker in it, that could not start.

    Args:
        stderr: what it said.
        root: where /proc/sys and the marks of containers are looked up.
    """
    said = stderr.strip().splitlines()[-1:] or ["no message"]
    last = said[0]
    if "Unknown option" in last:
        return SandboxError(
            f"this bubblewrap is too old ({last})",
            expected="version 0.8.0 or newer (Debian 12, Ubuntu 24.04)",
        )
    if any(word in last for word in _NAMESPACE_WORDS):
        return _explain_namespaces(last, root)
    action = ""
    if "Permission denied" in stderr:
        action = "Every user must be able to read Python, NumPy and this package (chmod -R a+rX)"
    return SandboxError(f"the sandbox could not start its worker: {last}", action=action)


def _explain_namespaces(said: str, root: Path) -> SandboxError:
    for restriction in _RESTRICTIONS:
        if _read(root / restriction.setting) == restriction.denies:
            return SandboxError(
                f"{restriction.what} ({said})",
                where=f"/{restriction.setting}",
                action=f"{restriction.action}. {_MANUAL}",
            )
    if any((root / mark).exists() for mark in _CONTAINER_MARKS):
        return SandboxError(
            f"this container does not let bubblewrap make namespaces ({said})",
            action=(
                "Run on the host, or start the container with --security-opt seccomp=unconfined "
                f"--security-opt apparmor=unconfined. {_MANUAL}"
            ),
        )
    return SandboxError(f"bubblewrap can't make its namespaces here: {said}", action=_MANUAL)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None

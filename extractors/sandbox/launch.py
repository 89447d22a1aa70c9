"""The step between the caller and bubblewrap: who it runs as, and that it ends with the caller.

Run as a script, `python -I -S -B launch.py LAUNCH`, with the JSON of `Launch`. Limits on processes
do not bind root, so root's call drops its user before bubblewrap starts. That user can't reach into
private folders such as /root, so what bubblewrap is to show is first bound, in a mount namespace of
this process alone, below a place that everyone can reach.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import stat
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_SLAVE = 0x2, 0x4, 0x1000, 0x4000, 0x80000
_PR_SET_PDEATHSIG = 1

# bubblewrap itself needs /tmp, and hides it from what it runs.
_STAGE = Path("/tmp")


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start.

    Args:
        before: bubblewrap and its options up to the binds.
        binds: an option such as `--ro-bind`, the path on the host, the path in the sandbox.
        after: options after the binds, and the command.
        user: the user and group to become; None: stay.
        parent: the process to end with.
    """

    before: list[str]
    binds: list[tuple[str, str, str]]
    after: list[str]
    user: int | None
    parent: int

    def encode(self) -> str:
        """The form that the script takes."""
        return json.dumps(asdict(self))


def main(text: str) -> None:
    """Become bubblewrap.

    Raises:
        OSError: a step failed; the message names it.
    """
    launch = Launch(**json.loads(text))
    libc = ctypes.CDLL(None, use_errno=True)
    sources = [source for _, source, _ in launch.binds]
    if launch.user is not None:
        sources = _stage(libc, sources)
        os.setgroups([])
        os.setresgid(launch.user, launch.user, launch.user)
        os.setresuid(launch.user, launch.user, launch.user)
    _call(libc, "prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launch.parent:
        os.kill(os.getpid(), signal.SIGKILL)
    arguments = list(launch.before)
    for (option, _, destination), source in zip(launch.binds, sources, strict=True):
        arguments += [option, source, destination]
    arguments += launch.after
    os.execv(arguments[0], arguments)


def _stage(libc: ctypes.CDLL, sources: list[str]) -> list[str]:
    _call(libc, "unshare", _CLONE_NEWNS)
    _call(libc, "mount", None, b"/", None, _MS_REC | _MS_SLAVE, None)
    handles = [os.open(source, os.O_PATH | os.O_CLOEXEC) for source in sources]
    options = b"mode=0755,size=1m"
    _call(libc, "mount", b"tmpfs", bytes(_STAGE), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)
    staged: list[str] = []
    for number, handle in enumerate(handles):
        place = _STAGE / str(number)
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            place.mkdir(mode=0o755)
        else:
            place.touch(mode=0o644)
        source = f"/proc/self/fd/{handle}".encode()
        _call(libc, "mount", source, bytes(place), None, _MS_BIND | _MS_REC, None)
        staged.append(str(place))
    return staged


def _call(libc: ctypes.CDLL, name: str, *arguments: bytes | int | None) -> None:
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OSError as error:
        sys.exit(f"launch: {error}")

"""A worker that attacks its walls, and says what it met.

At import only the sandbox's own walls stand; in `main` the system call filter does, too.
Arguments: the attack's name, then what it needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

ARGUMENTS: list[str] = json.loads(sys.argv[1])["arguments"]
LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE

_PR_GET_NO_NEW_PRIVS = 39
_PR_CAPBSET_READ = 23


def outcome(attempt: Callable[[], object]) -> str:
    """`done`, or the name of the error that stopped the attempt."""
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "done"


def checked(name: str, *arguments: object) -> Callable[[], None]:
    """A call of libc that raises its error."""

    def call() -> None:
        if getattr(LIBC, name)(*arguments) == -1:
            raise OSError(ctypes.get_errno(), name)

    return call


def connect(family: int, address: tuple[str, int] | str) -> str:
    with socket.socket(family) as client:
        return outcome(lambda: client.connect(address))


def capabilities() -> list[int]:
    """Effective, permitted and inheritable sets (capget(2), version 3)."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    checked("capget", header, sets)()
    return list(sets)


def folders() -> list[str]:
    skipped = ("/proc", "/sys", "/out")
    found = ["/"]
    for folder, names, _ in os.walk("/"):
        names[:] = [name for name in names if str(Path(folder, name)) not in skipped]
        found += [str(Path(folder, name)) for name in names]
    return found


def create_in(folder: str) -> str:
    def attempt() -> None:
        os.close(os.open(Path(folder, "probe-was-here"), os.O_CREAT | os.O_WRONLY))

    return outcome(attempt)


def writable_files() -> list[str]:
    def attempt(path: Path) -> str:
        return outcome(lambda: os.close(os.open(path, os.O_WRONLY)))

    files = [path for folder in folders() for path in Path(folder).iterdir() if path.is_file()]
    return [str(path) for path in files if attempt(path) == "done"]


def command_lines() -> list[str]:
    lines: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().decode(errors="replace"))
    return lines


def open_descriptors() -> list[int]:
    return [fd for fd in range(1024) if outcome(partial(os.fstat, fd)) == "done"]


def look_around() -> dict[str, object]:
    """What the sandbox shows before the filter closes. ARGUMENTS: port, IPC key, token, paths."""
    port, key, token, *paths = ARGUMENTS[1:]
    return {
        "user": [*os.getresuid(), *os.getresgid()],
        "groups": os.getgroups(),
        "no new privileges": LIBC.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0),
        "capabilities": capabilities(),
        "bounding set": [n for n in range(64) if LIBC.prctl(_PR_CAPBSET_READ, n, 0, 0, 0) == 1],
        "environment": dict(os.environ),
        "host name": socket.gethostname(),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "loopback": connect(socket.AF_INET, ("127.0.0.1", int(port))),
        "abstract socket": connect(socket.AF_UNIX, f"\0{token}"),
        "shared memory": outcome(checked("shmget", int(key), PAGE, 0)),
        "paths": {path: outcome(Path(path).stat) for path in paths},
        "token seen": any(f"{token}-bystander" in line for line in command_lines()),
        "root": sorted(path.name for path in Path("/").iterdir()),
        "mount": outcome(checked("mount", b"tmpfs", b"/out", b"tmpfs", 0, None)),
        "set user": outcome(lambda: os.setresuid(0, 0, 0)),
        "writable files": writable_files(),
        "created in": [folder for folder in folders() if create_in(folder) == "done"],
        "limits": {
            name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
            for name in ("AS", "FSIZE", "CORE", "NOFILE", "CPU")
        },
        "user namespace": outcome(checked("unshare", 0x10000000)),
    }


def try_out(source: int, output: str) -> dict[str, object]:
    """What the filter lets through: all that a reader needs, and no more."""
    made = os.open(f"{output}/made", os.O_RDWR | os.O_TRUNC)
    os.write(made, b"0123456789")
    page = mmap.mmap(-1, PAGE)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    executable = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    refused: dict[str, Callable[[], object]] = {
        "executable mapping": lambda: mmap.mmap(-1, PAGE, prot=executable),
        "executable page": checked("mprotect", address, PAGE, executable),
        "new file": lambda: os.open(f"{output}/new", os.O_CREAT | os.O_WRONLY, 0o644),
        "nameless file": lambda: os.open(output, os.O_TMPFILE | os.O_RDWR, 0o644),
        "folder": lambda: Path(output, "folder").mkdir(),
        "other name": lambda: Path(output, "made").rename(f"{output}/renamed"),
        "no file any more": lambda: Path(output, "made").unlink(),
        "set-user-ID file": lambda: os.open(f"{output}/suid", os.O_CREAT | os.O_WRONLY, 0o4755),
        "set-group-ID file": lambda: os.open(f"{output}/sgid", os.O_CREAT | os.O_WRONLY, 0o2755),
        "mode of the source": lambda: os.fchmod(source, 0o777),
        "mode of a file": lambda: Path(output, "made").chmod(0o4755),
        "symbolic link": lambda: Path(output, "link").symlink_to("/etc/passwd"),
        "hard link": lambda: Path(output, "again").hardlink_to(f"{output}/made"),
        "fifo": lambda: os.mkfifo(f"{output}/fifo"),
        "signal": lambda: os.kill(1, signal.SIGTERM),
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, 0),
        "memory file": lambda: os.memfd_create("probe"),
        "process control": checked("prctl", _PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0),
        "terminal control": checked("ioctl", 0, 0x5412, b"x"),
    }
    allowed: dict[str, Callable[[], object]] = {
        "read at": lambda: os.pread(source, 1, 0),
        "write at": lambda: os.pwrite(made, b"x", 3),
        "truncate": lambda: os.ftruncate(made, 8),
        "allocate": lambda: os.posix_fallocate(made, 0, 4096),
        "copy": lambda: os.copy_file_range(source, made, 4, 0, 0),
        "sync": lambda: os.fsync(made),
        "list": lambda: list(Path(output).iterdir()),
        "status": Path(output).stat,
        "random": lambda: os.urandom(16),
        "nap": lambda: time.sleep(0.001),
        "hash": lambda: hashlib.sha256(bytes(PAGE)).hexdigest(),
        "compute": lambda: np.arange(1 << 20).astype(np.float32).sum(),
        "thread": run_thread,
        "text": lambda: write_text(os.open(f"{output}/text", os.O_WRONLY | os.O_TRUNC)),
    }
    return {
        "environment": dict(os.environ),
        "descriptors": [fd for fd in open_descriptors() if fd != made],
        "source": source,
        "write to the source": outcome(lambda: os.pwrite(source, b"x", 0)),
        "truncate the source": outcome(lambda: os.ftruncate(source, 0)),
        "refused": {name: outcome(attempt) for name, attempt in refused.items()},
        "allowed": {name: outcome(attempt) for name, attempt in allowed.items()},
    }


def write_text(fd: int) -> None:
    with os.fdopen(fd, "w", encoding="utf-16") as file:
        file.write("ü")


def run_thread() -> None:
    thread = threading.Thread(target=time.monotonic)
    thread.start()
    thread.join()


def multiply() -> list[object]:
    """Fork until it is refused; then how often, and why."""
    children = 0
    with contextlib.suppress(BlockingIOError):
        while children < 1000:
            if os.fork() == 0:
                signal.pause()
            children += 1
        return [children, "done"]
    return [children, "EAGAIN"]


def hoard() -> None:
    """Two processes that together need more than one of them may."""
    child = os.fork()
    block = bytearray(int(ARGUMENTS[1]))
    while child == 0 or os.waitpid(child, os.WNOHANG) == (0, 0):
        block[::PAGE] = bytes(len(block) // PAGE)
    sys.exit(1)


def leave_child() -> None:
    """A child in its own session, deaf to signals, that holds the source open."""
    if os.fork() == 0:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            signal.pause()


EARLY: dict[str, object] = {}
GATE = threading.Event()
BEFORE: dict[str, Callable[[], object]] = {
    "walls": look_around,
    "multiply": multiply,
    "hoard": hoard,
    "leave child": leave_child,
    "fork in a thread": lambda: threading.Thread(
        target=lambda: GATE.wait() and os.fork(), daemon=True
    ).start(),
    "fail to import": lambda: __import__("no_such_module"),
}
if ARGUMENTS[0] in BEFORE:
    EARLY["found"] = BEFORE[ARGUMENTS[0]]()


def fork_in_thread() -> None:
    GATE.set()
    while True:
        time.sleep(1)


def spin() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def wait_in_silence() -> None:
    os.close(1)
    os.close(2)
    while True:
        time.sleep(1)


def write_much(output: str, size: int) -> None:
    fd = os.open(f"{output}/much", os.O_WRONLY)
    for offset in range(0, size, 1 << 20):
        os.pwrite(fd, bytes(1 << 20), offset)


def grow(output: str, size: int) -> None:
    os.ftruncate(os.open(f"{output}/much", os.O_WRONLY), size)


def drain(source: int) -> None:
    """Read a page, then ask for more than there will ever be."""
    while os.read(source, PAGE):
        pass


def talk(lines: int) -> None:
    for number in range(lines):
        print(f"{number:099d}")
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\xff\x1b[31mend")


FATAL: dict[str, Callable[[], object]] = {
    "fork": os.fork,
    "exec": lambda: os.execv(sys.executable, ["python", "-c", ""]),
    "socket": socket.socket,
    "socket pair": socket.socketpair,
    "ptrace": checked("ptrace", 0, 0, 0, 0),
    "read a process": checked("process_vm_readv", 1, None, 0, None, 0, 0),
    "unshare": checked("unshare", 0x10000000),
    "join a namespace": checked("setns", 0, 0),
    "mount": checked("mount", b"tmpfs", b"/out", b"tmpfs", 0, None),
    "change root": lambda: os.chroot("/out"),
}


def main(source: int, output: str, arguments: list[str]) -> int:
    attack, *rest = arguments
    actions: dict[str, Callable[[], object]] = {
        "walls": lambda: try_out(source, output),
        "fork in a thread": fork_in_thread,
        "spin": spin,
        "leave child": spin,
        "wait in silence": wait_in_silence,
        "write much": lambda: write_much(output, int(rest[0])),
        "grow a file": lambda: grow(output, int(rest[0])),
        "allocate": lambda: bytearray(int(rest[0])),
        "allocate an array": lambda: np.ones(int(rest[0]), np.uint8),
        "map shared memory": lambda: mmap.mmap(-1, int(rest[0])),
        "drain": lambda: drain(source),
        "talk": lambda: talk(int(rest[0])),
        "fail": lambda: 1 // 0,
        "return": lambda: None,
        "multiply": lambda: None,
    }
    found = (actions | FATAL)[attack]()
    if attack in ("walls", "multiply"):
        print(json.dumps({"early": EARLY.get("found"), "late": found}))
    return int(rest[0]) if attack == "return" else 0

"""The last wall, raised by the worker's own process: a system call filter that only adds.

A worker that has imported all it needs only reads, computes, and writes to files that are there for
it; it makes none. Any other call fails with EPERM, and those that only an attack would try end the
process. Once installed, a filter can't be removed or loosened, and holds for every thread.

The filter is built here, not handed to `bwrap --seccomp`, because it must also refuse `execve` and
executable mappings, which starting the interpreter and importing NumPy need; and because the same
code then locks a worker in Docker.

Numbers: Linux `arch/x86/entry/syscalls/syscall_64.tbl` and `include/uapi/asm-generic/unistd.h`.
Instructions and return values: `linux/filter.h`, `linux/seccomp.h`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the kernel names a machine, and which column of the table below is its own."""

    audit: int
    column: int
    seccomp: int
    foreign: int | None


ARCHITECTURES = {
    "x86_64": Architecture(audit=0xC000003E, column=0, seccomp=317, foreign=0x40000000),
    "aarch64": Architecture(audit=0xC00000B7, column=1, seccomp=277, foreign=None),
}

Numbers = tuple[int | None, int | None]

ALLOWED: dict[str, Numbers] = {
    "pread64": (17, 67),
    "preadv": (295, 69),
    "preadv2": (327, 286),
    "read": (0, 63),
    "write": (1, 64),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "lseek": (8, 62),
    "futex": (202, 98),
    "close": (3, 57),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "getdents64": (217, 61),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "copy_file_range": (326, 285),
    "fadvise64": (221, 223),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "brk": (12, 214),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "gettimeofday": (96, 169),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "exit": (60, 93),
    "exit_group": (231, 94),
}

FATAL: dict[str, Numbers] = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
}

# The arguments of clone3 lie in memory, where a filter can't look; without it libc uses clone.
ABSENT: dict[str, Numbers] = {"clone3": (435, 435)}

_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | errno.EPERM
_UNKNOWN = 0x00050000 | errno.ENOSYS
_KILL = 0x80000000

_LOAD, _RETURN, _EQUAL, _AT_LEAST, _ANY_BIT = 0x20, 0x06, 0x15, 0x35, 0x45
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16

_PROT_EXEC = 0x4
_CLONE_THREAD = 0x10000
_MAKES_A_FILE = 0o20000100  # O_CREAT, and the bit of O_TMPFILE


@dataclass(frozen=True, slots=True)
class ArgumentRule:
    """What happens to a call by whether an argument has any bit of a mask."""

    numbers: Numbers
    argument: int
    mask: int
    set_action: int
    clear_action: int


RULES: dict[str, ArgumentRule] = {
    "openat": ArgumentRule((257, 56), 2, _MAKES_A_FILE, _REFUSE, _ALLOW),
    "mmap": ArgumentRule((9, 222), 2, _PROT_EXEC, _REFUSE, _ALLOW),
    "mprotect": ArgumentRule((10, 226), 2, _PROT_EXEC, _REFUSE, _ALLOW),
    "clone": ArgumentRule((56, 220), 0, _CLONE_THREAD, _ALLOW, _KILL),
}


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _when(test: int, value: int, body: bytes) -> bytes:
    return _instruction(test, value, 0, len(body) // 8) + body


def _unless(test: int, value: int, body: bytes) -> bytes:
    return _instruction(test, value, len(body) // 8, 0) + body


def _by_argument(rule: ArgumentRule) -> bytes:
    # The low half of an argument, where all the tested bits are: both machines are little-endian.
    return (
        _instruction(_LOAD, _ARGUMENTS_AT + 8 * rule.argument)
        + _when(_ANY_BIT, rule.mask, _instruction(_RETURN, rule.set_action))
        + _instruction(_RETURN, rule.clear_action)
    )


def filter_program(machine: str) -> bytes:
    """The filter as classic BPF, 8 bytes an instruction, for `x86_64` or `aarch64`.

    Raises:
        KeyError: for any other machine.
    """
    architecture = ARCHITECTURES[machine]
    kill = _instruction(_RETURN, _KILL)
    program = _instruction(_LOAD, _ARCHITECTURE_AT)
    program += _unless(_EQUAL, architecture.audit, kill)
    program += _instruction(_LOAD, _NUMBER_AT)
    if architecture.foreign is not None:
        program += _when(_AT_LEAST, architecture.foreign, kill)
    bodies: list[tuple[Numbers, bytes]] = []
    for table, action in ((ALLOWED, _ALLOW), (FATAL, _KILL), (ABSENT, _UNKNOWN)):
        bodies += [(numbers, _instruction(_RETURN, action)) for numbers in table.values()]
    bodies += [(rule.numbers, _by_argument(rule)) for rule in RULES.values()]
    for numbers, body in bodies:
        number = numbers[architecture.column]
        if number is not None:
            program += _when(_EQUAL, number, body)
    return program + _instruction(_RETURN, _REFUSE)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_TSYNC = 1


def lock_down() -> None:
    """Install the filter in every thread of this process, for good.

    Raises:
        OSError: the kernel refuses it, or the machine is neither x86_64 nor aarch64.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOTSUP, f"no system call filter for {machine} machines")
    code = filter_program(machine)
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_long(ARCHITECTURES[machine].seccomp)
    arguments = _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, ctypes.byref(program)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(number, *arguments):
        number_of_error = ctypes.get_errno()
        raise OSError(number_of_error, f"system call filter: {os.strerror(number_of_error)}")

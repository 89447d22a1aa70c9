"""The filter, evaluated for both machines by an interpreter of classic BPF."""

from __future__ import annotations

import struct
from typing import Literal

import pytest

from sam3d_gguf.extractors.sandbox.lockdown import filter_program

Machine = Literal["x86_64", "aarch64"]

# AUDIT_ARCH_* of linux/audit.h.
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "i386": 0x40000003, "arm": 0x40000028}

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000

# Numbers as the kernel's asm/unistd_64.h and asm-generic/unistd.h define them.
READING = {
    "x86_64": {0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 24, 25, 28, 39}
    | {60, 74, 75, 77, 96, 98, 131, 186, 202, 204, 217, 219, 221, 228, 229, 230, 231}
    | {257, 262, 273, 285, 295, 318, 326, 327, 334},
    "aarch64": {46, 47, 56, 57, 61, 62, 63, 64, 65, 66, 67, 68, 69, 79, 80, 82, 83, 93, 94, 98}
    | {99, 113, 114, 115, 123, 124, 128, 132, 134, 135, 139, 165, 169, 172, 178, 214, 215}
    | {216, 222, 223, 226, 233, 278, 285, 286, 293},
}
ATTACKING = {
    "x86_64": {41, 42, 53, 57, 58, 59, 101, 155, 161, 165, 166, 175, 246, 248, 249, 250, 272, 298}
    | {304, 308, 310, 311, 313, 320, 321, 322, 323, 425, 428, 429, 430},
    "aarch64": {39, 40, 41, 51, 97, 104, 105, 117, 198, 199, 203, 217, 218, 219, 221, 241, 265}
    | {268, 270, 271, 273, 280, 281, 282, 294, 425, 428, 429, 430},
}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
OPENAT = {"x86_64": 257, "aarch64": 56}
MMAP = {"x86_64": 9, "aarch64": 222}
MPROTECT = {"x86_64": 10, "aarch64": 226}


def evaluate(machine: Machine, number: int, *arguments: int, audit: int | None = None) -> int:
    """Run the filter on a call as the kernel would, with the instructions that it uses."""
    padded = (*arguments, *(0,) * (6 - len(arguments)))
    call = struct.pack("=IIQ6Q", number, audit or AUDIT[machine], 0, *padded)
    program = [*struct.iter_unpack("=HBBI", filter_program(machine))]
    at, accumulator = 0, 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", call, value)
            case 0x15:
                at += if_true if accumulator == value else if_false
            case 0x35:
                at += if_true if accumulator >= value else if_false
            case 0x45:
                at += if_true if accumulator & value else if_false
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(f"instruction {code:#x}")


MACHINES: list[Machine] = ["x86_64", "aarch64"]


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_is_judged(machine: Machine) -> None:
    for number in range(600):
        verdict = evaluate(machine, number)
        if number in READING[machine]:
            assert verdict == ALLOW, number
        elif number in ATTACKING[machine] or number == CLONE[machine]:
            assert verdict == KILL, number
        else:
            assert verdict == (ENOSYS if number == CLONE3 else EPERM), number


@pytest.mark.parametrize("machine", MACHINES)
def test_only_threads_are_cloned(machine: Machine) -> None:
    # CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD, as pthread_create does.
    assert evaluate(machine, CLONE[machine], 0x10F00) == ALLOW
    assert evaluate(machine, CLONE[machine], 0x00F00) == KILL


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("call", [MMAP, MPROTECT])
def test_no_memory_becomes_executable(machine: Machine, call: dict[str, int]) -> None:
    for protection in range(8):
        expected = EPERM if protection & 0x4 else ALLOW
        assert evaluate(machine, call[machine], 0, 4096, protection) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_no_file_is_made(machine: Machine) -> None:
    # O_WRONLY | O_TRUNC | O_CLOEXEC; then with O_CREAT, and as O_TMPFILE without O_DIRECTORY
    # (asm-generic/fcntl.h, which both machines use for these).
    assert evaluate(machine, OPENAT[machine], 3, 0, 0o2001001, 0o644) == ALLOW
    for flags in (0o101, 0o301, 0o20000002):
        for mode in (0o644, 0o4755):
            assert evaluate(machine, OPENAT[machine], 3, 0, flags, mode) == EPERM


@pytest.mark.parametrize(("machine", "foreign"), [("x86_64", "i386"), ("aarch64", "arm")])
def test_calls_of_another_kind_of_machine_end_it(machine: Machine, foreign: str) -> None:
    for number in range(600):
        assert evaluate(machine, number, audit=AUDIT[foreign]) == KILL


def test_the_x32_variants_end_it() -> None:
    for number in range(600):
        assert evaluate("x86_64", 0x40000000 | number) == KILL


def test_the_kernel_takes_as_many_instructions() -> None:
    # BPF_MAXINSNS of linux/bpf_common.h.
    assert all(len(filter_program(machine)) <= 4096 * 8 for machine in MACHINES)

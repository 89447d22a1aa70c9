"""Upper bounds on what a reader accepts, so that a hostile file costs little before it is refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the static readers; the largest official file stays far below each of them.

    Attributes:
        members: members of a zip archive.
        directory_bytes: size of a zip archive's central directory.
        inflated_bytes: size of all deflated code members together, once inflated.
        pickle_bytes: size of one pickle.
        opcodes: opcodes of one pickle, which also bounds the objects that it can make.
        stack: values on the pickle machine's stack.
        memo: entries of the pickle machine's memo.
        globals: different globals that one pickle names.
        calls: calls that one pickle asks for, all of which are kept.
        text_bytes: encoded size of one string, global name or line.
        integer_bytes: size of one integer.
        nesting: depth of the object tree that is walked.
        steps: places visited in the object tree, each path to a shared object counted.
        entries: values kept of one kind (attributes, reported content).
        tensors: tensors found.
        name_characters: length of a tensor or member name.
        dimensions: dimensions of a tensor.
        tensor_bytes: size of all wanted tensors together, views and copies counted in full.
    """

    members: int = 65_536
    directory_bytes: int = 32 << 20
    inflated_bytes: int = 64 << 20
    pickle_bytes: int = 64 << 20
    opcodes: int = 1_000_000
    stack: int = 500_000
    memo: int = 500_000
    globals: int = 16_384
    calls: int = 131_072
    text_bytes: int = 1 << 20
    integer_bytes: int = 128
    nesting: int = 200
    steps: int = 1_000_000
    entries: int = 65_536
    tensors: int = 32_768
    name_characters: int = 1_024
    dimensions: int = 32
    tensor_bytes: int = 1 << 38

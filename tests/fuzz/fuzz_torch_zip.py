"""Fuzz target: the zip directory, zip checkpoints and TorchScript archives.

The first byte says what the rest is: a whole file, or a pickle to wrap into a sound archive, whose
CRC-32s a fuzzer would not get right. In a whole file that is accepted, Python's zipfile must see
the same members with the same bytes.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable

from checkpoint_bytes import module, pickled, script_archive, tensor, zip_checkpoint
from checkpoint_invariants import LIMITS, read_checked
from memory_source import memory_source

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.sniff import sniff
from sam3d_gguf.extractors.zip_directory import iter_inflated, read_zip_directory
from sam3d_gguf.schemas.errors import Sam3dError

STORAGES = {"0": bytes(24), "1": bytes(48)}
MODULE = pickled(module({"weight": tensor()}))


def constants(data: bytes) -> bytes:
    return script_archive(MODULE, STORAGES, members={"constants.pkl": data})


WRAPPERS: tuple[Callable[[bytes], bytes], ...] = (
    bytes,
    lambda data: zip_checkpoint(data, STORAGES),
    lambda data: script_archive(data, STORAGES),
    constants,
)


def one_input(data: bytes) -> None:
    """Reads data as a zip archive; raises anything but a refusal only where it is wrong."""
    if not data:
        return
    file = WRAPPERS[data[0] % len(WRAPPERS)](data[1:])
    with memory_source(file) as source:
        sniff(source, LIMITS)
        read_checked(source)
        compare(source, file)


def compare(source: ByteSource, file: bytes) -> None:
    """Python's zipfile sees the same members."""
    try:
        found = read_zip_directory(source, LIMITS)
        contents = {
            member.name: b"".join(iter_inflated(source, member))
            for member in found.members.values()
            if member.size <= LIMITS.inflated_bytes
        }
    except Sam3dError:
        return
    with zipfile.ZipFile(io.BytesIO(file)) as theirs:
        assert {info.filename for info in theirs.infolist()} >= contents.keys()
        assert all(theirs.read(name) == content for name, content in contents.items())

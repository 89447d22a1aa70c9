"""Fuzz target: checkpoints in the form before torch 1.6.

The first byte says what the rest is: a whole file, one without its magic number, or a pickle to put
between a sound head and sound storages.
"""

from __future__ import annotations

from collections.abc import Callable

from checkpoint_bytes import MAGIC, legacy_checkpoint
from checkpoint_invariants import read_checked
from memory_source import memory_source

STORAGES = {"0": bytes(24), "1": bytes(48)}
WRAPPERS: tuple[Callable[[bytes], bytes], ...] = (
    bytes,
    lambda data: MAGIC + data,
    lambda data: legacy_checkpoint(data, STORAGES),
    lambda data: legacy_checkpoint(data, {"0": bytes(24)}),
)


def one_input(data: bytes) -> None:
    """Reads data as a checkpoint; raises anything but a refusal only where it is wrong."""
    if not data:
        return
    with memory_source(WRAPPERS[data[0] % len(WRAPPERS)](data[1:])) as source:
        read_checked(source)

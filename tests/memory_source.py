"""Bytes as an input file, without a disk."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

from sam3d_gguf.extractors.byte_source import ByteSource


@contextmanager
def memory_source(data: bytes, name: str = "input") -> Generator[ByteSource]:
    """A source that holds `data`, open as long as the context."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        yield ByteSource(fd, name)
    finally:
        os.close(fd)

"""Large files past the page cache: the same bytes as the ordinary way, whatever the file system."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam3d_gguf.extractors import direct_io
from sam3d_gguf.extractors.direct_io import (
    ALIGNMENT,
    DiskSource,
    StreamWriter,
    open_direct,
    reopen_direct,
)
from sam3d_gguf.schemas.errors import InputError

BUFFER = 2 * ALIGNMENT
PLACES = st.integers(0, 6 * BUFFER) | st.sampled_from([0, ALIGNMENT, BUFFER, 3 * BUFFER])
SIZES = st.integers(0, 3 * BUFFER) | st.sampled_from([1, ALIGNMENT, BUFFER, BUFFER - 1])


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "BUFFER_BYTES", BUFFER)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def no_descriptor(_path: str, _flags: int) -> None:
    """Opens nothing."""


def refuse_direct(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A file system that doesn't open files for direct transfers, or refuses them later."""
    if how == "at opening":
        monkeypatch.setattr(direct_io, "open_direct", no_descriptor)
    elif how == "at transfers":
        # As if the device wanted a larger alignment.
        monkeypatch.setattr(direct_io, "ALIGNMENT", 64)


REFUSALS = ["never", "at opening", "at transfers"]


def test_only_whole_aligned_blocks_are_transferred_directly(
    fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An ordinary descriptor in the place of a direct one, so that it holds on any file system.
    stand_in = os.open(tmp_path / "file", os.O_WRONLY)
    written: list[tuple[bool, int, int]] = []
    pwrite = os.pwrite

    def record(target: int, data: memoryview, offset: int) -> int:
        written.append((target == stand_in, offset, len(data)))
        return pwrite(target, data, offset)

    monkeypatch.setattr(os, "pwrite", record)
    with StreamWriter(fd, stand_in) as writer:
        writer.write_at(ALIGNMENT - 5, memoryview(bytes(2 * ALIGNMENT)))
        writer.flush()

    head, middle, tail = ALIGNMENT - 5, ALIGNMENT, 2 * ALIGNMENT
    assert written == [(False, head, 5), (True, middle, ALIGNMENT), (False, tail, ALIGNMENT - 5)]


@pytest.mark.parametrize("how", REFUSALS)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(PLACES, SIZES), min_size=1, max_size=8), st.integers(0, 999))
def test_what_was_written_is_there(
    how: str,
    tmp_path_factory: pytest.TempPathFactory,
    places: list[tuple[int, int]],
    seed: int,
) -> None:
    random = Random(seed)
    path = tmp_path_factory.mktemp("direct") / "file"
    expected = bytearray()
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    with pytest.MonkeyPatch.context() as monkeypatch:
        refuse_direct(monkeypatch, how)
        with StreamWriter(fd, reopen_direct(fd, os.O_WRONLY)) as writer:
            for offset, size in places:
                data = bytearray(random.randbytes(size))
                if size:
                    expected.extend(bytes(max(0, offset + size - len(expected))))
                    expected[offset : offset + size] = data
                writer.write_at(offset, memoryview(data))
                data[:] = bytes(size)  # the caller may use its memory again
            writer.flush()
            assert path.read_bytes() == expected
        with DiskSource(fd, "file") as source:
            buffer = memoryview(bytearray(len(expected)))
            position = 0
            while position < len(expected):
                count = random.randint(1, 2 * BUFFER)
                source.pread_into(position, buffer[position : position + count])
                position += count
            assert bytes(buffer) == expected
    os.close(fd)


@pytest.mark.parametrize("how", REFUSALS)
def test_reads_may_go_back(how: str, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(5 * BUFFER + 3)
    os.pwrite(fd, content, 0)
    refuse_direct(monkeypatch, how)
    with DiskSource(fd, "file") as source:
        for offset in (4 * BUFFER + 5, 0, 2 * BUFFER - 1, BUFFER, 5 * BUFFER, 7):
            size = min(BUFFER + 1, len(content) - offset)
            buffer = memoryview(bytearray(size))
            source.pread_into(offset, buffer)
            assert bytes(buffer) == content[offset : offset + size]


@pytest.mark.parametrize("how", REFUSALS)
@pytest.mark.parametrize("left", [0, 1, BUFFER, BUFFER + 7, 2 * BUFFER + 9])
def test_a_file_that_shrinks_while_it_is_read(
    how: str, left: int, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.pwrite(fd, os.urandom(3 * BUFFER), 0)
    refuse_direct(monkeypatch, how)
    with DiskSource(fd, "file") as source:
        os.ftruncate(fd, left)
        with pytest.raises(InputError, match=r"ends at byte \d+, but had"):
            source.pread_into(0, memoryview(bytearray(3 * BUFFER)))


def test_reads_outside_the_file_are_refused(fd: int) -> None:
    os.pwrite(fd, b"abc", 0)
    with DiskSource(fd, "file") as source, pytest.raises(InputError, match="outside the file"):
        source.pread_into(1, memoryview(bytearray(3)))


def failing(code: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_no_failure_of_the_thread_is_lost(
    fd: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StreamWriter(fd, reopen_direct(fd, os.O_WRONLY)) as writer:
        monkeypatch.setattr(os, "pwrite", failing(code))
        with pytest.raises(OSError, match=os.strerror(code)):
            for block in range(4):
                writer.write_at(block * BUFFER, memoryview(bytes(BUFFER)))
            writer.flush()


def test_a_disk_that_cannot_be_read(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.pwrite(fd, bytes(BUFFER), 0)
    with DiskSource(fd, "file") as source:
        monkeypatch.setattr(os, "preadv", failing(errno.EIO))
        with pytest.raises(InputError, match="could not be read at byte 0: Input/output error"):
            source.pread_into(0, memoryview(bytearray(BUFFER)))


def test_descriptors_are_closed(fd: int, tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with StreamWriter(fd, open_direct(str(tmp_path / "file"), os.O_WRONLY)) as writer:
        writer.write_at(0, memoryview(b"x"))
        writer.flush()
    with DiskSource(fd, "file") as source:
        source.pread_into(0, memoryview(bytearray(1)))
    assert len(list(Path("/proc/self/fd").iterdir())) == before

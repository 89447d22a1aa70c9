"""The zip directory: what torch and Python write is read, every lie and every hiding place refused."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable

import pytest
from checkpoint_bytes import Entry, zip_archive
from hypothesis import given
from hypothesis import strategies as st
from memory_source import memory_source

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.limits import Limits
from sam3d_gguf.extractors.zip_directory import (
    DEFLATED,
    STORED,
    ZipArchive,
    check_crc,
    iter_inflated,
    read_member,
    read_zip_directory,
)
from sam3d_gguf.schemas.errors import InputError

DATA = Entry(b"a/data", b"data")
MORE = Entry(b"a/more", b"more bytes")
CODE = Entry(b"a/code", b"code " * 99, method=8)


def directory(data: bytes, limits: Limits | None = None) -> ZipArchive:
    with memory_source(data) as source:
        return read_zip_directory(source, limits)


def contents(data: bytes) -> dict[str, bytes]:
    with memory_source(data) as source:
        archive = read_zip_directory(source)
        return {
            name: b"".join(iter_inflated(source, member))
            for name, member in archive.members.items()
        }


names = st.text(
    st.characters(exclude_categories=("C", "Z"), exclude_characters="/\\"), min_size=1, max_size=9
).filter(lambda name: name not in (".", ".."))


@given(
    names,
    st.dictionaries(names, st.binary(max_size=99), min_size=1, max_size=9),
    st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
)
def test_archives_of_zipfile_are_read(root: str, files: dict[str, bytes], method: int) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as writer:
        for name, data in files.items():
            writer.writestr(f"{root}/{name}", data)

    data = file.getvalue()

    assert contents(data) == files
    assert directory(data).root == root


def test_archives_streamed_by_zipfile_are_read() -> None:
    class Unseekable(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise io.UnsupportedOperation

        def seek(self, *_: int) -> int:
            raise io.UnsupportedOperation

    file = Unseekable()
    with zipfile.ZipFile(file, "w") as writer:
        writer.writestr("a/one", b"one")
        with writer.open("a/two", "w", force_zip64=True) as member:
            member.write(b"two")

    assert contents(file.getvalue()) == {"one": b"one", "two": b"two"}


@pytest.mark.parametrize("form", ["<III", "<4sIII", "<IQQ", "<4sIQQ"])
def test_every_form_of_data_descriptor_is_read(form: str) -> None:
    entries = [Entry(b"a/one", b"one", descriptor=form), Entry(b"a/two", b"two", descriptor=form)]

    assert contents(zip_archive(entries)) == {"one": b"one", "two": b"two"}


def test_members_are_found_in_file_order() -> None:
    data = zip_archive([MORE, DATA, CODE])

    found = directory(data)

    assert list(found.members) == ["more", "data", "code"]
    member = found.members["code"]
    assert (member.name, member.size, member.method) == ("a/code", 495, DEFLATED)
    assert member.stored < member.size
    assert found.members["data"].method == STORED
    assert data[found.members["data"].offset :].startswith(b"data")


def sparse_archive(fd: int) -> int:
    """Write an archive as torch writes it with a member of more than 4 GiB; return its size."""
    size = 2**32 + 9
    extra = struct.pack("<HHQQ", 1, 16, size, 0)
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, 2056, 0, 0, 0, 0, 0, 0, 3, len(extra))
    os.pwrite(fd, local + b"a/0" + extra, 0)
    after = len(local) + 3 + len(extra) + size
    os.pwrite(fd, struct.pack("<4sIQQ", b"PK\7\10", 5, size, size), after)
    second = after + 24
    extra2 = struct.pack("<HHQ", 1, 8, second)
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, 2056, 0, 0, 0, 0, 0, 0, 3, len(extra2))
    tail = (
        local
        + b"a/1"
        + extra2
        + b"xyz"
        + struct.pack("<4sIQQ", b"PK\7\10", zlib.crc32(b"xyz"), 3, 3)
    )
    at = second + len(tail)
    full = 0xFFFFFFFF
    extra = struct.pack("<HHQQ", 1, 16, size, size)
    head = struct.pack("<4sHHHHHHIII", b"PK\1\2", 0, 0, 2056, 0, 0, 0, 5, full, full)
    tail += head + struct.pack("<HHHHHII", 3, len(extra), 0, 0, 0, 0, 0) + b"a/0" + extra
    head = struct.pack("<4sHHHHHHIII", b"PK\1\2", 0, 0, 2056, 0, 0, 0, zlib.crc32(b"xyz"), 3, 3)
    tail += head + struct.pack("<HHHHHII", 3, len(extra2), 0, 0, 0, 0, full) + b"a/1" + extra2
    end = second + len(tail)
    tail += struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 0, 0, 0, 0, 2, 2, end - at, at)
    tail += struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    tail += struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 2, 2, end - at, full, 0)
    os.pwrite(fd, tail, second)
    return second + len(tail)


def test_members_beyond_4_gib_are_found() -> None:
    fd = os.memfd_create("sparse")
    try:
        size = sparse_archive(fd)
        source = ByteSource(fd)
        found = read_zip_directory(source)
        assert source.size == size
        assert found.members["0"].size == 2**32 + 9
        assert read_member(source, found.members["1"], 10) == b"xyz"
    finally:
        os.close(fd)


def lie(local: bool = True, central: bool = False, **fields: object) -> bytes:
    first = Entry(b"a/data", b"data")
    first.local = fields if local else {}
    first.central = fields if central else {}
    return zip_archive([first, MORE])


def overlapping() -> bytes:
    second = Entry(b"a/more", b"more", central={"at": 0})
    return zip_archive([DATA, second])


def nested() -> bytes:
    """A member whose bytes hold the local header of another."""
    inner = Entry(b"a/more", b"more")
    outer = Entry(b"a/data", b"data" + inner.bytes())
    inner.central = {"at": 30 + 6 + 4}
    data = zip_archive([outer, inner])
    return data


ZIP64 = struct.pack("<HH", 1, 8) + bytes(8)
REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "short": (b"PK\3\4", "too short"),
    "without directory": (DATA.bytes() + bytes(30), "does not end with a zip directory"),
    "cut by one byte": (zip_archive([DATA])[:-1], "does not end with a zip directory"),
    "one byte more": (zip_archive([DATA], tail=b"\0"), "does not end with a zip directory"),
    "comment": (zip_archive([DATA], comment=b"hi"), "does not end with a zip directory"),
    "comment that is an end": (
        zip_archive([DATA], comment=zip_archive([DATA])[-22:]),
        "before, behind or inside",
    ),
    "promised comment": (
        zip_archive([DATA])[:-2] + b"\1\0",
        "archive comment",
    ),
    "no members": (zip_archive([]), "empty zip"),
    "several disks": (zip_archive([DATA], end={"disk": 1}), "several disks"),
    "first disk": (zip_archive([DATA], end={"first": 1}), "several disks"),
    "entries on another disk": (zip_archive([DATA], end={"here": 2}), "several disks"),
    "entry on another disk": (lie(False, True, disk=1), "another disk"),
    "fewer entries than said": (zip_archive([DATA], end={"here": 2, "count": 2}), "fewer"),
    "more entries than said": (zip_archive([DATA, MORE], end={"here": 1, "count": 1}), "another size"),
    "65535 entries": (zip_archive([DATA], end={"here": 65535, "count": 65535}), "fewer"),
    "directory of 4 GiB": (zip_archive([DATA], end={"size": 0xFFFFFFFF}), "directory of"),
    "directory elsewhere": (zip_archive([DATA], end={"at": 3}), "before, behind or inside"),
    "directory past the end": (zip_archive([DATA], end={"at": 0xFFFFFFF0}), "before, behind"),
    "bytes before the first member": (zip_archive([DATA], prefix=b"#!"), "bytes lie before"),
    "prefix as in self-extracting files": (b"MZ" + zip_archive([DATA]), "before, behind"),
    "bytes before the directory": (zip_archive([DATA], between=b"hidden"), "lie behind 'a/data'"),
    "bytes between members": (
        zip_archive([Entry(b"a/data", b"data", gap=b"hidden"), MORE]),
        "6 bytes lie behind 'a/data'",
    ),
    "overlapping members": (overlapping(), "overlaps"),
    "one member inside another": (nested(), "overlaps"),
    "member longer than its room": (
        lie(True, True, stored=400, size=400),
        "overlaps the member after it",
    ),
    "members out of order": (
        zip_archive([Entry(b"a/data", b"data", central={"at": 0xFFFF}), MORE]),
        "overlaps|before it",
    ),
    "name twice": (zip_archive([DATA, Entry(b"a/data", b"other")]), "'a/data' twice"),
    "two root folders": (zip_archive([DATA, Entry(b"b/x", b"")]), "outside the root"),
    "no root folder": (zip_archive([Entry(b"data.pkl", b"")]), "in no folder"),
    "other local name": (lie(name=b"a/dada"), "another name"),
    "longer local name": (lie(name=b"a/data2"), "another name"),
    "other local signature": (lie(signature=b"PK\1\1"), "no local header"),
    "other central signature": (lie(False, True, signature=b"PK\1\1"), "malformed directory"),
    "other local method": (lie(method=8), "other flags or method"),
    "other local flags": (lie(flags=0x800), "other flags or method"),
    "other local CRC-32": (lie(crc32=1), "another size or CRC-32"),
    "other local size": (lie(size=3), "another size or CRC-32"),
    "other local stored size": (lie(stored=3), "another size or CRC-32"),
    "local sizes of zero without descriptor": (lie(crc32=0, size=0, stored=0), "another size"),
    "encrypted": (lie(True, True, flags=1), "encrypted"),
    "encrypted in the directory": (lie(False, True, flags=1), "encrypted"),
    "strong encryption": (lie(True, True, flags=0x40), "unknown flags 0x40"),
    "patch data": (lie(True, True, flags=0x20), "unknown flags 0x20"),
    "masked header": (lie(True, True, flags=0x2000), "unknown flags 0x2000"),
    "newer zip version": (lie(False, True, version=46), "zip version 46"),
    "newer zip version in the local header": (lie(version=63), "zip version 63"),
    "unknown method": (lie(True, True, method=12), "unknown compression method 12"),
    "stored with two sizes": (lie(True, True, size=5), "two sizes"),
    "entry comment": (lie(False, True, comment=b"hi"), "has a comment"),
    "zip64 without extra field": (lie(True, True, size=0xFFFFFFFF), "zip64"),
    "zip64 extra field for nothing": (lie(True, True, extra=ZIP64), "another length"),
    "zip64 offset past the end": (
        lie(False, True, at=0xFFFFFFFF, extra=struct.pack("<HHQ", 1, 8, 2**63)),
        "overlaps|before it",
    ),
    "zip64 size of 2**64-1": (
        lie(True, True, size=0xFFFFFFFF, stored=0xFFFFFFFF, extra=struct.pack("<HHQQ", 1, 16, 2**64 - 1, 2**64 - 1)),
        "overlaps",
    ),
    "extra field cut short": (lie(extra=b"FB"), "malformed extra"),
    "extra field longer than said": (lie(extra=b"FB\xff\0"), "malformed or unknown extra"),
    "extra field twice": (lie(extra=b"FB\0\0FB\0\0"), "malformed or unknown extra"),
    "Unicode path extra field": (lie(extra=b"up\0\0"), "malformed or unknown extra"),
    "AES extra field": (lie(extra=b"\x01\x99\0\0"), "malformed or unknown extra"),
    "local header past the end": (lie(extra_size=0xFFFF), "outside the file"),
    "descriptor of another size": (
        zip_archive([Entry(b"a/data", b"data", flags=8, gap=b"hidden")]),
        "6 bytes lie behind",
    ),
    "descriptor with other values": (
        zip_archive([Entry(b"a/data", b"data", flags=8, gap=bytes(16))]),
        "in its data descriptor",
    ),
    "descriptor without flag": (
        zip_archive([Entry(b"a/data", b"data", gap=struct.pack("<4sIII", b"PK\7\10", zlib.crc32(b"data"), 4, 4))]),
        "16 bytes lie behind",
    ),
    "missing descriptor": (zip_archive([Entry(b"a/data", b"data", flags=8)]), "lie behind"),
    "zip64 end elsewhere": (zip_archive([DATA], zip64=True, locator={"start": 3}), "right before"),
    "zip64 end of another size": (zip_archive([DATA], zip64=True, end64={"record": 99}), "malformed"),
    "zip64 on several disks": (zip_archive([DATA], zip64=True, end64={"disk": 1}), "several disks"),
    "zip64 locator of several disks": (zip_archive([DATA], zip64=True, locator={"disks": 2}), "several"),
    "zip64 end on another disk": (zip_archive([DATA], zip64=True, locator={"on": 1}), "several"),
    "zip64 directory on another disk": (zip_archive([DATA], zip64=True, end64={"first": 1}), "several"),
    "zip64 entries on another disk": (zip_archive([DATA], zip64=True, end64={"here": 2}), "several"),
    "zip64 end without signature": (
        zip_archive([DATA], zip64=True).replace(b"PK\6\6", b"PK\6\5"),
        "malformed zip64 end record",
    ),
    "two ends that disagree": (zip_archive([DATA], zip64=True, end={"count": 2, "here": 2}), "disagree"),
    "zip64 with 2**63 entries": (
        zip_archive([DATA], zip64=True, end64={"count": 2**63, "here": 2**63}, end={"count": 0xFFFF, "here": 0xFFFF}),
        "more than 65536",
    ),
    "zip64 directory past the end": (
        zip_archive([DATA], zip64=True, end64={"at": 2**63}, end={"at": 0xFFFFFFFF}),
        "before, behind",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_torch_would_not_write_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        directory(data)


@pytest.mark.parametrize(
    "name",
    [
        b"a/../b", b"../a/b", b"/a/b", b"a//b", b"a/", b"a/./b", b"a\\b/c", b"a/b\\..\\c", b"C:\\a/b",
        b"a/b\0c", b"a/b\nc", b"a/\x1b[2J", b"a/\xff", b"a/\xc3\xa9", b"", b"a/" + b"x" * 2_000,
    ],
)  # fmt: skip
def test_names_that_do_not_stay_inside_are_refused(name: bytes) -> None:
    with pytest.raises(InputError, match="member name"):
        directory(zip_archive([Entry(name, b"")]))


def test_a_name_that_only_claims_to_be_utf8_is_refused() -> None:
    with pytest.raises(InputError, match="not UTF-8"):
        directory(zip_archive([Entry(b"a/\xff", b"", flags=0x800)]))
    assert "\xe9" in directory(zip_archive([Entry("a/\xe9".encode(), b"", flags=0x800)])).members


@pytest.mark.parametrize(
    "limits", [Limits(members=1), Limits(directory_bytes=80), Limits(name_characters=5)]
)
def test_each_limit_holds(limits: Limits) -> None:
    data = zip_archive([DATA, MORE])
    directory(data)
    with pytest.raises(InputError):
        directory(data, limits)


def first_member(data: bytes, read: Callable[[ByteSource, ZipArchive], object]) -> None:
    with memory_source(data) as source:
        read(source, read_zip_directory(source))


def inflate(source: ByteSource, archive: ZipArchive) -> None:
    for member in archive.members.values():
        check_crc(source, member)


def test_damaged_bytes_are_found_by_their_crc() -> None:
    data = zip_archive([DATA, CODE])
    first_member(data, inflate)

    damaged = data.replace(b"a/datadata", b"a/datadada")
    with pytest.raises(InputError, match="'a/data': its bytes have the CRC-32"):
        first_member(damaged, inflate)
    with pytest.raises(InputError, match="'a/data': its bytes have the CRC-32"):
        first_member(
            damaged, lambda source, archive: read_member(source, archive.members["data"], 9)
        )


def deflated(data: bytes, **fields: int) -> bytes:
    """A member of method 8 whose compressed bytes are `data` as they are."""
    entry = Entry(b"a/code", data, local={"method": 8, **fields}, central={"method": 8, **fields})
    return zip_archive([entry])


def deflate(data: bytes) -> bytes:
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    return deflater.compress(data) + deflater.flush()


ZEROS = deflate(bytes(10_000_000))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (deflated(b"\xff\xff\xff"), "malformed deflate"),
        (deflated(deflate(b"text")[:-1], size=4), "does not end with the member"),
        (deflated(deflate(b"text") + b"more", size=4), "does not end with the member"),
        (deflated(deflate(b"text"), size=5), "another size"),
        (deflated(deflate(b"text"), size=3), "another size"),
        (deflated(deflate(b"text"), size=4), "CRC-32"),
        (deflated(ZEROS, size=1_000), "another size"),
    ],
)
def test_deflated_members_are_what_they_say(data: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        first_member(data, inflate)


def test_a_bomb_is_stopped_at_its_stated_size() -> None:
    blocks: list[int] = []

    def measure(source: ByteSource, archive: ZipArchive) -> None:
        for block in iter_inflated(source, archive.members["code"]):
            blocks.append(len(block))

    with pytest.raises(InputError, match="another size"):
        first_member(deflated(ZEROS, size=2_000_000), measure)
    assert sum(blocks) <= 2_000_000


def test_only_stored_members_within_the_limit_are_read_whole() -> None:
    with memory_source(zip_archive([DATA, CODE])) as source:
        members = read_zip_directory(source).members
        assert read_member(source, members["data"], 4) == b"data"
        with pytest.raises(InputError, match="at most 3"):
            read_member(source, members["data"], 3)
        with pytest.raises(InputError, match="compressed"):
            read_member(source, members["code"], 1_000)


@given(st.data())
def test_any_change_is_read_or_refused(draw: st.DataObject) -> None:
    data = bytearray(zip_archive([DATA, CODE, MORE], zip64=draw.draw(st.booleans())))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    try:
        contents(bytes(data))
    except InputError:
        return

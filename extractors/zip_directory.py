"""The directory of a zip archive as torch writes it, read without trusting any of its numbers.

Only archives in which nothing can hide are accepted: members one after the other from byte 0, each
local header agreeing with the central directory, the directory right behind the last member, its
end record at the end of the file. The structures are those of the ZIP file format specification
(APPNOTE 6.3.10); section numbers below are its.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from struct import Struct
from types import MappingProxyType

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.limits import Limits
from sam3d_gguf.extractors.printable import quoted
from sam3d_gguf.schemas.errors import InputError

STORED, DEFLATED = 0, 8
_LOCAL = Struct("<IHHHHHIIIHH")  # 4.3.7
_DESCRIPTORS = (Struct("<III"), Struct("<IIII"), Struct("<IQQ"), Struct("<IIQQ"))  # 4.3.9
_CENTRAL = Struct("<IHHHHHHIIIHHHHHII")  # 4.3.12
_END64 = Struct("<4sQHHIIQQQQ")  # 4.3.14
_LOCATOR = Struct("<4sIQI")  # 4.3.15
_END = Struct("<4sHHHHIIH")  # 4.3.16
_EXTRA = Struct("<HH")  # 4.5.1
_U64 = Struct("<Q")
_LOCAL_SIGNATURE, _CENTRAL_SIGNATURE, _DESCRIPTOR_SIGNATURE = 0x04034B50, 0x02014B50, 0x08074B50
_HAS_DESCRIPTOR, _UTF8 = 1 << 3, 1 << 11
_FLAGS = _HAS_DESCRIPTOR | _UTF8 | 0b110  # and deflate's own two
_ZIP64 = 0x0001
_EXTRAS = {_ZIP64, 0x4246, 0x5455, 0x7875}  # sizes; torch's padding "FB"; times; owner
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_NEWEST_VERSION = 45  # that of zip64 (4.4.3)
_BLOCK = 1 << 20
_EXPECTED = "a complete zip archive as torch writes it"
_NOT_OFFICIAL = "No official file is like that, and no damage makes it so: don't trust or unpack it"


@dataclass(frozen=True, slots=True)
class ZipMember:
    """One member; `name` includes the root folder.

    Attributes:
        offset: where its (compressed) bytes begin in the file.
        stored: how many there are.
        size: how many there are once inflated.
        method: STORED or DEFLATED.
    """

    name: str
    offset: int
    stored: int
    size: int
    crc32: int
    method: int


class AmbiguousArchive(InputError):
    """An archive that two programs may read differently, or that writes elsewhere when unpacked."""


@dataclass(frozen=True, slots=True)
class ZipArchive:
    """The members by their name below the root folder, in file order."""

    root: str
    members: Mapping[str, ZipMember]


def read_zip_directory(source: ByteSource, limits: Limits | None = None) -> ZipArchive:
    """Read the directory and every local header; no member is read.

    Raises:
        InputError: the archive is cut short, inconsistent, ambiguous, or torch would not write it.
    """
    return _Reader(source, limits or Limits()).read()


def read_member(source: ByteSource, member: ZipMember, limit: int) -> bytes:
    """Return a stored member's bytes, their CRC-32 checked.

    Raises:
        InputError: it is deflated, larger than `limit`, or its CRC-32 differs.
    """
    if member.method != STORED:
        raise InputError("is compressed", where=_where(source, member), expected="a stored member")
    if member.size > limit:
        raise InputError(
            f"has {member.size} bytes", where=_where(source, member), expected=f"at most {limit}"
        )
    data = source.pread(member.offset, member.size)
    _require_crc(source, member, zlib.crc32(data))
    return data


def iter_inflated(source: ByteSource, member: ZipMember) -> Iterator[bytes]:
    """Yield a member's bytes in blocks of at most 1 MiB; its size and CRC-32 are checked at the end.

    Raises:
        InputError: the deflate stream is malformed, or its size or CRC-32 differs.
    """
    crc = size = 0
    blocks = _stored(source, member) if member.method == STORED else _deflated(source, member)
    for block in blocks:
        crc = zlib.crc32(block, crc)
        size += len(block)
        if size > member.size:
            break
        yield block
    if size != member.size:
        raise InputError(
            "inflates to another size than its header says",
            where=_where(source, member),
            expected=f"{member.size} bytes",
        )
    _require_crc(source, member, crc)


def check_crc(source: ByteSource, member: ZipMember) -> None:
    """Read a member through and compare its CRC-32.

    Raises:
        InputError: it differs.
    """
    for _ in iter_inflated(source, member):
        pass


def _stored(source: ByteSource, member: ZipMember) -> Iterator[bytes]:
    end = member.offset + member.stored
    for offset in range(member.offset, end, _BLOCK):
        yield source.pread(offset, min(_BLOCK, end - offset))


def _deflated(source: ByteSource, member: ZipMember) -> Iterator[bytes]:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        for pending in _stored(source, member):
            while pending and not inflater.eof:
                yield inflater.decompress(pending, _BLOCK)
                pending = inflater.unconsumed_tail
    except zlib.error as error:
        raise InputError(
            f"malformed deflate stream: {error}", where=_where(source, member)
        ) from error
    if not inflater.eof or inflater.unused_data:
        raise InputError(
            "its deflate stream does not end with the member", where=_where(source, member)
        )


def _require_crc(source: ByteSource, member: ZipMember, crc: int) -> None:
    if crc != member.crc32:
        raise InputError(
            f"its bytes have the CRC-32 {crc:08x}",
            where=_where(source, member),
            expected=f"{member.crc32:08x}",
            action="The file is damaged: fetch it again",
        )


def _where(source: ByteSource, member: ZipMember) -> str:
    return f"{source.name}: {quoted(member.name)}"


@dataclass(frozen=True, slots=True)
class _Directory:
    entries: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """A central directory entry, its zip64 values resolved; `at` is its local header's offset."""

    raw_name: bytes
    name: str
    flags: int
    method: int
    crc32: int
    stored: int
    size: int
    at: int


class _Reader:
    __slots__ = ("limits", "source")

    def __init__(self, source: ByteSource, limits: Limits) -> None:
        self.source = source
        self.limits = limits

    def read(self) -> ZipArchive:
        directory = self.directory()
        entries = sorted(self.entries(directory), key=lambda entry: entry.at)
        ends = [entry.at for entry in entries[1:]] + [directory.offset]
        members = list(map(self.member, entries, ends, [0, *ends[:-1]]))
        root = entries[0].name.partition("/")[0]
        found: dict[str, ZipMember] = {}
        for member in members:
            folder, slash, name = member.name.partition("/")
            if not slash or folder != root:
                place = f"outside the root folder {quoted(root)}" if slash else "in no folder"
                raise self.error(f"{quoted(member.name)} lies {place}")
            if name in found:
                raise self.ambiguous(f"holds {quoted(member.name)} twice")
            found[name] = member
        return ZipArchive(root, MappingProxyType(found))

    def error(self, what: str) -> InputError:
        return InputError(
            what,
            where=self.source.name,
            expected=_EXPECTED,
            action="Fetch the file again, or save it again with torch.save",
        )

    def ambiguous(self, what: str) -> AmbiguousArchive:
        return AmbiguousArchive(
            what, where=self.source.name, expected=_EXPECTED, action=_NOT_OFFICIAL
        )

    # The end of the archive

    def directory(self) -> _Directory:
        at = self.source.size - _END.size
        if at < 0:
            raise self.error("is too short for a zip archive")
        signature, disk, first_disk, here, entries, size, offset, comment = _END.unpack(
            self.source.pread(at, _END.size)
        )
        if signature != b"PK\5\6":
            raise self.error("does not end with a zip directory: it is cut short or has a tail")
        if comment:
            raise self.error("ends in an archive comment")
        if disk or first_disk or here != entries:
            raise self.error("is one part of a zip archive on several disks")
        directory = _Directory(entries, offset, size)
        locator = self.source.pread(at - _LOCATOR.size, _LOCATOR.size) if at >= 20 else b""
        if locator[:4] == b"PK\6\7":
            at, directory = self.directory64(at - _LOCATOR.size, locator, directory)
        return self.bounded(directory, at)

    def directory64(self, at: int, locator: bytes, short: _Directory) -> tuple[int, _Directory]:
        _, disk, start, disks = _LOCATOR.unpack(locator)
        if start != at - _END64.size:
            raise self.error("has no zip64 end record right before its locator")
        record = _END64.unpack(self.source.pread(start, _END64.size))
        signature, record_size, _, _, here_disk, first_disk, here, entries, size, offset = record
        if signature != b"PK\6\6" or record_size != _END64.size - 12:
            raise self.error("has a malformed zip64 end record")
        if disk or disks > 1 or here_disk or first_disk or here != entries:
            raise self.error("is one part of a zip archive on several disks")
        pairs = (
            (short.entries, entries, _FULL16),
            (short.offset, offset, _FULL32),
            (short.size, size, _FULL32),
        )
        if any(value not in (full, value64) for value, value64, full in pairs):
            raise self.error("has two end records that disagree")
        return start, _Directory(entries, offset, size)

    def bounded(self, directory: _Directory, end: int) -> _Directory:
        if directory.entries == 0:
            raise self.error("is an empty zip archive")
        if directory.entries > self.limits.members:
            raise self.error(f"has {directory.entries} members, more than {self.limits.members}")
        if directory.size > self.limits.directory_bytes:
            raise self.error(f"has a directory of {directory.size} bytes")
        if directory.offset + directory.size != end:
            raise self.error("has bytes before, behind or inside its zip directory")
        return directory

    # The central directory

    def entries(self, directory: _Directory) -> Iterator[_Entry]:
        data = self.source.pread(directory.offset, directory.size)
        at = 0
        for _ in range(directory.entries):
            if at + _CENTRAL.size > len(data):
                raise self.error("has fewer directory entries than it says")
            fields = _CENTRAL.unpack_from(data, at)
            name_at = at + _CENTRAL.size
            extra_at = name_at + fields[10]
            at = extra_at + fields[11] + fields[12]
            yield self.entry(fields, data[name_at:extra_at], data[extra_at : extra_at + fields[11]])
        if at != len(data):
            raise self.error("has a directory of another size than it says")

    def entry(self, fields: tuple[int, ...], raw_name: bytes, extra: bytes) -> _Entry:
        flags, method, crc32, stored, size = fields[3], fields[4], fields[7], fields[8], fields[9]
        comment, disk, at = fields[12], fields[13], fields[16]
        name = self.name(raw_name, flags)
        if fields[0] != _CENTRAL_SIGNATURE:
            raise self.error("has a malformed directory entry")
        if flags & 1:
            raise self.error(f"{quoted(name)} is encrypted")
        if flags & ~_FLAGS:
            raise self.error(f"{quoted(name)} has the unknown flags 0x{flags & ~_FLAGS:x}")
        if fields[2] > _NEWEST_VERSION:
            raise self.error(f"{quoted(name)} needs the zip version {fields[2]}")
        if method not in (STORED, DEFLATED):
            raise self.error(f"{quoted(name)} has the unknown compression method {method}")
        if comment:
            raise self.error(f"{quoted(name)} has a comment")
        if disk:
            raise self.error(f"{quoted(name)} lies on another disk")
        size, stored, at = self.zip64(name, self.extra(name, extra), (size, stored, at))
        if method == STORED and size != stored:
            raise self.error(f"{quoted(name)} is stored, but has two sizes")
        return _Entry(raw_name, name, flags, method, crc32, stored, size, at)

    def name(self, raw: bytes, flags: int) -> str:
        try:
            name = raw.decode("utf-8" if flags & _UTF8 else "ascii")
        except UnicodeDecodeError:
            raise self.error(f"the member name {quoted(raw)} is not UTF-8") from None
        if len(name) > self.limits.name_characters:
            raise self.error(f"has a member name of {len(name)} characters")
        if "\\" in name or not name.isprintable():
            raise self.ambiguous(
                f"the member name {quoted(name)} holds a backslash or a control character"
            )
        if name.endswith("/"):
            raise self.error(f"the member name {quoted(name)} is a folder's")
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise self.ambiguous(f"the member name {quoted(name)} does not stay inside a folder")
        return name

    def extra(self, name: str, data: bytes) -> dict[int, bytes]:
        fields: dict[int, bytes] = {}
        at = 0
        while at < len(data):
            if at + _EXTRA.size > len(data):
                raise self.error(f"{quoted(name)} has a malformed extra field")
            key, size = _EXTRA.unpack_from(data, at)
            at += _EXTRA.size + size
            if at > len(data) or key in fields or key not in _EXTRAS:
                raise self.error(
                    f"{quoted(name)} has the malformed or unknown extra field 0x{key:04x}"
                )
            fields[key] = data[at - size : at]
        return fields

    def zip64(
        self, name: str, extra: dict[int, bytes], values: tuple[int, int, int]
    ) -> tuple[int, int, int]:
        """Replace the values that are full by those of the zip64 extra field, in order (4.5.3)."""
        wide = extra.get(_ZIP64, b"")
        resolved: list[int] = []
        for value in values:
            if value == _FULL32:
                if len(wide) < _U64.size:
                    raise self.error(
                        f"{quoted(name)} lacks the zip64 size or offset that it promises"
                    )
                value, wide = _U64.unpack(wide[:8])[0], wide[8:]
            resolved.append(value)
        if wide:
            raise self.error(f"{quoted(name)} has a zip64 extra field of another length")
        return resolved[0], resolved[1], resolved[2]

    # The local headers

    def member(self, entry: _Entry, end: int, start: int) -> ZipMember:
        """Check the local header against the entry, and that the member ends where the next begins."""
        if entry.at != start:
            raise self.ambiguous(
                f"{quoted(entry.name)} overlaps another member, or bytes lie before it"
            )
        fields = _LOCAL.unpack(self.source.pread(entry.at, _LOCAL.size))
        rest = self.source.pread(entry.at + _LOCAL.size, fields[9] + fields[10])
        offset = entry.at + _LOCAL.size + len(rest)
        self.same(entry, fields, rest[: fields[9]])
        self.same_sizes(entry, fields, self.extra(entry.name, rest[fields[9] :]))
        tail = end - offset - entry.stored
        if tail < 0:
            raise self.ambiguous(f"{quoted(entry.name)} overlaps the member after it")
        self.descriptor(entry, offset + entry.stored, tail)
        return ZipMember(entry.name, offset, entry.stored, entry.size, entry.crc32, entry.method)

    def same(self, entry: _Entry, fields: tuple[int, ...], raw_name: bytes) -> None:
        if fields[0] != _LOCAL_SIGNATURE:
            raise self.error(f"{quoted(entry.name)} has no local header")
        if raw_name != entry.raw_name:
            raise self.ambiguous(f"{quoted(entry.name)} has another name in its local header")
        if fields[1] > _NEWEST_VERSION:
            raise self.error(f"{quoted(entry.name)} needs the zip version {fields[1]}")
        if fields[2] != entry.flags or fields[3] != entry.method:
            raise self.error(f"{quoted(entry.name)} has other flags or method in its local header")

    def same_sizes(self, entry: _Entry, fields: tuple[int, ...], extra: dict[int, bytes]) -> None:
        crc32, stored, size = fields[6], fields[7], fields[8]
        accepted = [(entry.crc32, entry.stored, entry.size)]
        if entry.flags & _HAS_DESCRIPTOR:
            accepted.append((0, 0, 0))
        if _FULL32 in (stored, size):
            size, stored, _ = self.zip64(entry.name, extra, (size, stored, 0))
        if (crc32, stored, size) not in accepted:
            raise self.error(f"{quoted(entry.name)} has another size or CRC-32 in its local header")

    def descriptor(self, entry: _Entry, at: int, size: int) -> None:
        """Check the data descriptor, which exactly fills the bytes up to the next member."""
        if not entry.flags & _HAS_DESCRIPTOR and size == 0:
            return
        layouts = [layout for layout in _DESCRIPTORS if layout.size == size]
        if not entry.flags & _HAS_DESCRIPTOR or not layouts:
            raise self.ambiguous(f"{size} bytes lie behind {quoted(entry.name)}")
        values = layouts[0].unpack(self.source.pread(at, size))
        if values not in (
            (entry.crc32, entry.stored, entry.size),
            (_DESCRIPTOR_SIGNATURE, entry.crc32, entry.stored, entry.size),
        ):
            raise self.error(
                f"{quoted(entry.name)} has another size or CRC-32 in its data descriptor"
            )

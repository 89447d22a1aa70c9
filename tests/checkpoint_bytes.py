"""Pickles, zip archives and torch checkpoints written field by field, to lie in each of them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

# Pickles


@dataclass(frozen=True)
class Global:
    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """A REDUCE of `function` with `arguments`, then a BUILD with `state` if there is one."""

    function: Any
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True)
class Persistent:
    id: Any


@dataclass(frozen=True)
class Raw:
    """Opcodes that leave one value on the stack."""

    opcodes: bytes


@dataclass(frozen=True)
class Pairs:
    """A dictionary by its entries, which may repeat or be unhashable."""

    entries: Sequence[tuple[Any, Any]]


Tree: TypeAlias = (
    bool
    | int
    | float
    | str
    | bytes
    | tuple[Any, ...]
    | list[Any]
    | dict[Any, Any]
    | Global
    | Call
    | Persistent
    | Raw
    | Pairs
    | None
)


def assemble(value: Tree) -> bytes:
    """The opcodes of protocol 2 that leave `value` on the stack."""
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(data)]) + data
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            data = value.encode()
            return b"X" + struct.pack("<I", len(data)) + data
        case bytes():
            return b"B" + struct.pack("<I", len(value)) + value
        case tuple():
            return b"(" + b"".join(map(assemble, value)) + b"t"
        case list():
            return b"](" + b"".join(map(assemble, value)) + b"e"
        case dict():
            return assemble(Pairs(list(value.items())))
        case Pairs():
            entries = (assemble(key) + assemble(item) for key, item in value.entries)
            return b"}(" + b"".join(entries) + b"u"
        case Global():
            return f"c{value.module}\n{value.name}\n".encode()
        case Persistent():
            return assemble(value.id) + b"Q"
        case Raw():
            return value.opcodes
        case Call():
            built = b"" if value.state is None else assemble(value.state) + b"b"
            return assemble(value.function) + assemble(value.arguments) + b"R" + built


def pickled(value: Tree) -> bytes:
    """A protocol 2 pickle of `value`."""
    return b"\x80\x02" + assemble(value) + b"."


def storage(
    key: str = "0", elements: int = 6, kind: str = "FloatStorage", *rest: Tree
) -> Persistent:
    return Persistent(("storage", Global("torch", kind), key, "cpu", elements, *rest))


def tensor(
    shape: Tree = (2, 3),
    strides: Tree = (3, 1),
    offset: Tree = 0,
    storage: Tree = storage(),  # noqa: B008
) -> Call:
    hooks = Call(Global("collections", "OrderedDict"))
    rebuild = Global("torch._utils", "_rebuild_tensor_v2")
    return Call(rebuild, (storage, offset, shape, strides, False, hooks))


# Zip archives


@dataclass
class Entry:
    """A zip member; what is None is what the data say.

    Attributes:
        local: replacements of the local header's fields.
        central: replacements of the directory entry's fields.
        descriptor: the data descriptor's format, "" for none.
        gap: bytes behind the member.
    """

    name: bytes
    data: bytes
    method: int = 0
    flags: int = 0
    local: dict[str, Any] = field(default_factory=dict[str, Any])
    central: dict[str, Any] = field(default_factory=dict[str, Any])
    descriptor: str = ""
    gap: bytes = b""

    def stored(self) -> bytes:
        if self.method != 8:
            return self.data
        deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
        return deflater.compress(self.data) + deflater.flush()

    def fields(self) -> dict[str, Any]:
        return {
            "flags": self.flags | (8 if self.descriptor else 0),
            "method": self.method,
            "crc32": zlib.crc32(self.data),
            "stored": len(self.stored()),
            "size": len(self.data),
            "name": self.name,
            "extra": b"",
        }

    def local_header(self) -> bytes:
        deferred = {"crc32": 0, "stored": 0, "size": 0} if self.descriptor else {}
        f: dict[str, Any] = {**self.fields(), "signature": b"PK\3\4", **deferred, **self.local}
        header: bytes = (
            struct.pack("<4sHHHHH", f["signature"], 20, f["flags"], f["method"], 0, 33)
            + struct.pack("<III", f["crc32"], f["stored"], f["size"])
            + struct.pack("<HH", len(f["name"]), f.get("extra_size", len(f["extra"])))
            + f["name"]
            + f["extra"]
        )
        return header

    def directory_entry(self, at: int) -> bytes:
        f: dict[str, Any] = {**self.fields(), "comment": b"", "disk": 0, "at": at}
        f = {"signature": b"PK\1\2", **f, **self.central}
        header: bytes = (
            struct.pack("<4sHHHHHH", f["signature"], 20, 20, f["flags"], f["method"], 0, 33)
            + struct.pack("<III", f["crc32"], f["stored"], f["size"])
            + struct.pack("<HHH", len(f["name"]), len(f["extra"]), len(f["comment"]))
            + struct.pack("<HHII", f["disk"], 0, 0, f["at"])
            + f["name"]
            + f["extra"]
            + f["comment"]
        )
        return header

    def bytes(self) -> bytes:
        member = self.local_header() + self.stored()
        if self.descriptor:
            values = (zlib.crc32(self.data), len(self.stored()), len(self.data))
            signature = (b"PK\7\10",) if "4s" in self.descriptor else ()
            member += struct.pack(self.descriptor, *signature, *values)
        return member + self.gap


def zip_archive(
    entries: Sequence[Entry],
    *,
    prefix: bytes = b"",
    between: bytes = b"",
    zip64: bool = False,
    end: Mapping[str, int] | None = None,
    end64: Mapping[str, int] | None = None,
    locator: Mapping[str, int] | None = None,
    comment: bytes = b"",
    tail: bytes = b"",
) -> bytes:
    """An archive of `entries`, in the order given; the mappings replace fields of its end."""
    body, directory = prefix, b""
    for entry in entries:
        directory += entry.directory_entry(len(body))
        body += entry.bytes()
    at = len(body) + len(between)
    count = len(entries)
    f: dict[str, int] = {
        "disk": 0,
        "first": 0,
        "here": count,
        "count": count,
        "size": len(directory),
        "at": at,
    }
    record = b""
    if zip64:
        w = {**f, "record": 44, "on": 0, "disks": 1, "start": at + len(directory)}
        w |= {**(end64 or {}), **(locator or {})}
        record = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", w["record"], 45, 45, w["disk"], w["first"],
                             w["here"], w["count"], w["size"], w["at"])  # fmt: skip
        record += struct.pack("<4sIQI", b"PK\6\7", w["on"], w["start"], w["disks"])
    f |= end or {}
    record += struct.pack("<4sHHHHIIH", b"PK\5\6", f["disk"], f["first"], f["here"], f["count"],
                          f["size"], f["at"], len(comment))  # fmt: skip
    return body + between + directory + record + comment + tail


# Checkpoints


def zip_checkpoint(
    tree: Tree,
    storages: Mapping[str, bytes] | None = None,
    *,
    root: str = "archive",
    members: Mapping[str, bytes] | None = None,
    descriptor: str = "",
) -> bytes:
    """A checkpoint in zip form; `tree` is a value, or a pickle as bytes."""
    data = tree if isinstance(tree, bytes) else pickled(tree)
    storages = {"0": bytes(24)} if storages is None else storages
    files = {"data.pkl": data, "byteorder": b"little", "version": b"3\n"}
    files |= {**{f"data/{key}": value for key, value in storages.items()}, **(members or {})}
    entries = [
        Entry(f"{root}/{name}".encode(), content, descriptor=descriptor)
        for name, content in files.items()
    ]
    return zip_archive(entries)


def script_archive(
    tree: Tree,
    storages: Mapping[str, bytes] | None = None,
    *,
    constants: Tree = (),
    members: Mapping[str, bytes] | None = None,
) -> bytes:
    """A TorchScript archive."""
    extra = {"constants.pkl": pickled(constants), **(members or {})}
    return zip_checkpoint(tree, storages, members=extra)


def module(attributes: Tree, name: str = "Module") -> Call:
    """A TorchScript module with the given attributes."""
    return Call(Global("__torch__", name), (), attributes)


MAGIC = pickled(0x1950A86A20F9469CFC6C)


def legacy_checkpoint(
    tree: Tree,
    storages: Mapping[str, bytes] | None = None,
    *,
    magic: bytes = MAGIC,
    version: Tree = 1001,
    system: Tree = None,
    keys: Tree = None,
    itemsize: int = 4,
    counts: Mapping[str, int] | None = None,
    tail: bytes = b"",
) -> bytes:
    """A checkpoint in the form before torch 1.6."""
    data = tree if isinstance(tree, bytes) else pickled(tree)
    storages = {"0": bytes(24)} if storages is None else storages
    system = {"protocol_version": 1001, "little_endian": True} if system is None else system
    file = magic + pickled(version) + pickled(system) + data
    file += pickled(list(storages) if keys is None else keys)
    for key, value in storages.items():
        count = (counts or {}).get(key, len(value) // itemsize)
        file += struct.pack("<q", count) + value
    return file + tail

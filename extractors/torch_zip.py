"""Checkpoints of torch.save since 1.6, and TorchScript archives since 1.4: both zip archives.

The layout is that of torch's `caffe2/serialize`: below one root folder lie `data.pkl`, an object
tree without its storages, and each storage as the member `data/<key>`. A TorchScript archive has
also `constants.pkl` with `constants/<key>`, and code, whose members alone may be compressed.
"""

from __future__ import annotations

import hashlib
import re

from sam3d_gguf.extractors.archive import Archive, build_archive
from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.kinds import FileKind
from sam3d_gguf.extractors.limits import Limits
from sam3d_gguf.extractors.object_tree import ObjectTree
from sam3d_gguf.extractors.pickle_machine import Pickle, read_pickle
from sam3d_gguf.extractors.printable import quoted
from sam3d_gguf.extractors.survey import Survey
from sam3d_gguf.extractors.tensor_ref import ITEMSIZE, StorageRef
from sam3d_gguf.extractors.torch_objects import Storage, UnreadableTensor
from sam3d_gguf.extractors.zip_directory import (
    STORED,
    ZipMember,
    iter_inflated,
    read_member,
    read_zip_directory,
)
from sam3d_gguf.schemas.errors import InputError

_FOLDERS = {"data": ("data", "tensors"), "constants": ("constants",)}
_CODE = re.compile(r"code/.+\.(py|debug_pkl)")
_RECORDS = frozenset(
    {
        "data.pkl",
        "constants.pkl",
        "version",
        "byteorder",
        ".format_version",
        ".storage_alignment",
        ".data/serialization_id",
    }
)
_RECORD_BYTES = 64


def read_torch_zip(source: ByteSource, kind: FileKind, limits: Limits) -> Archive:
    """Read a zip checkpoint or TorchScript archive; storages are located, not read.

    Raises:
        InputError: it is malformed, beyond a limit, big-endian, or a tensor of it can't be read.
    """
    return _Reader(source, kind, limits).read()


class _Reader:
    def __init__(self, source: ByteSource, kind: FileKind, limits: Limits) -> None:
        self.source = source
        self.kind = kind
        self.limits = limits
        self.zip = read_zip_directory(source, limits)
        self.storages: set[str] = set()

    def read(self) -> Archive:
        self.require_stored()
        self.require_little_endian()
        tree = ObjectTree(self.source.name, self.limits)
        pickles = {"": self.pickle("data.pkl")}
        root = pickles[""].value
        if self.kind is FileKind.TORCHSCRIPT:
            pickles["CONSTANTS"] = self.pickle("constants.pkl")
            tree.add_module(root, self.locate)
            tree.add_constants(pickles["CONSTANTS"].value, self.locate_constant)
            wrapper = "module"
        else:
            wrapper = tree.add_state_dict(root, self.locate)
        survey = Survey(pickles, tree.wanted, limits=self.limits, where=self.source.name)
        code = self.hash_code()
        used = self.storages | _RECORDS | code.keys()
        return build_archive(
            self.kind,
            wrapper,
            tree,
            survey,
            tuple(pickles.values()),
            root=self.zip.root,
            version=self.record("version"),
            code=code,
            ignored=tuple(name for name in self.zip.members if name not in used),
            members=self.zip.members,
        )

    def require_stored(self) -> None:
        for name, member in self.zip.members.items():
            if member.method != STORED and not self.is_code(name):
                raise InputError(
                    "is compressed, which torch does to code only",
                    where=self.where(name),
                    expected="a stored member",
                    action="No official file is like that. Save the checkpoint with torch.save",
                )

    def require_little_endian(self) -> None:
        order = self.record("byteorder")
        if order not in ("", "little"):
            raise InputError(
                f"was written in {quoted(order)} byte order",
                where=self.source.name,
                expected="little-endian storages",
                action="Load it and save it again on a little-endian machine",
            )

    def record(self, name: str) -> str:
        """Return a small text member, "" if there is none."""
        member = self.zip.members.get(name)
        if member is None:
            return ""
        data = read_member(self.source, member, _RECORD_BYTES)
        if not data.isascii():
            raise InputError("is not ASCII text", where=self.where(name))
        return data.decode("ascii").strip()

    def pickle(self, name: str) -> Pickle:
        member = self.zip.members.get(name)
        if member is None:
            raise InputError(f"has no member {quoted(name)}", where=self.source.name)
        data = read_member(self.source, member, self.limits.pickle_bytes)
        pickle = read_pickle(data, limits=self.limits, where=self.where(name))
        if pickle.end != len(data):
            raise InputError(
                f"{len(data) - pickle.end} bytes lie behind the pickle's end",
                where=self.where(name),
            )
        return pickle

    def locate(self, storage: Storage) -> StorageRef:
        return self.find("data", storage)

    def locate_constant(self, storage: Storage) -> StorageRef:
        return self.find("constants", storage)

    def find(self, archive: str, storage: Storage) -> StorageRef:
        names = [f"{folder}/{storage.key}" for folder in _FOLDERS[archive]]
        name = next((name for name in names if name in self.zip.members), None)
        if name is None:
            raise UnreadableTensor(
                f"lies in the member {quoted(names[0])}, which the archive lacks"
            )
        member = self.zip.members[name]
        nbytes = storage.elements * ITEMSIZE[storage.dtype]
        if storage.window is not None:
            raise UnreadableTensor("views a part of its storage, as only the old form does")
        if member.size != nbytes:
            raise UnreadableTensor(
                f"lies in a storage of {nbytes} bytes, but {quoted(name)} has {member.size}"
            )
        self.storages.add(name)
        return StorageRef(storage.key, name, member.offset, member.size)

    def is_code(self, name: str) -> bool:
        return self.kind is FileKind.TORCHSCRIPT and _CODE.fullmatch(name) is not None

    def hash_code(self) -> dict[str, str]:
        members = [
            (name, member) for name, member in self.zip.members.items() if self.is_code(name)
        ]
        total = sum(member.size for _, member in members)
        if total > self.limits.inflated_bytes:
            raise InputError(
                f"has {total} bytes of code",
                where=self.source.name,
                expected=f"at most {self.limits.inflated_bytes}",
            )
        return {name: _sha256(self.source, member) for name, member in members}

    def where(self, name: str) -> str:
        return f"{self.source.name}: {quoted(self.zip.root + '/' + name)}"


def _sha256(source: ByteSource, member: ZipMember) -> str:
    digest = hashlib.sha256()
    for block in iter_inflated(source, member):
        digest.update(block)
    return digest.hexdigest()

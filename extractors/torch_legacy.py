"""Checkpoints as torch.save wrote them before 1.6, and still does on request.

Five pickles follow each other: the magic number, the protocol version, facts about the machine, the
object tree, the storage keys. Then each storage comes as an int64 number of elements and the
elements.
"""

from __future__ import annotations

from dataclasses import replace
from struct import Struct

from sam3d_gguf.extractors.archive import Archive, build_archive
from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.describe import label
from sam3d_gguf.extractors.kinds import FileKind
from sam3d_gguf.extractors.limits import Limits
from sam3d_gguf.extractors.object_tree import ObjectTree
from sam3d_gguf.extractors.pickle_machine import Pickle, Value, read_pickle
from sam3d_gguf.extractors.survey import Survey
from sam3d_gguf.extractors.tensor_ref import ITEMSIZE, StorageRef
from sam3d_gguf.extractors.torch_objects import (
    Storage,
    UnreadableTensor,
    dict_pairs,
    storage_itemsizes,
)
from sam3d_gguf.schemas.errors import InputError

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
_COUNT = Struct("<q")


def read_torch_legacy(source: ByteSource, limits: Limits) -> Archive:
    """Read a checkpoint in the form before torch 1.6; storages are located, not read.

    Raises:
        InputError: it is malformed, beyond a limit, big-endian, or a tensor of it can't be read.
    """
    pickles = _pickles(source, limits)
    magic, version, system, root, keys = pickles
    if magic.value != MAGIC_NUMBER or version.value != PROTOCOL_VERSION:
        raise _error(source, "does not start with torch's magic number and protocol version")
    _require_little_endian(source, system.value)
    storages = _storages(source, root, keys)
    used: set[str] = set()

    def locate(storage: Storage) -> StorageRef:
        used.add(storage.key)
        return _part(storages, storage)

    tree = ObjectTree(source.name, limits)
    wrapper = tree.add_state_dict(root.value, locate)
    named = {"": root, "(system)": system, "(magic)": magic, "(version)": version, "(keys)": keys}
    return build_archive(
        FileKind.TORCH_LEGACY,
        wrapper,
        tree,
        Survey(named, tree.wanted, limits=limits, where=source.name),
        tuple(pickles),
        version=str(PROTOCOL_VERSION),
        ignored=tuple(key for key in storages if key not in used),
    )


def _pickles(source: ByteSource, limits: Limits) -> list[Pickle]:
    data = source.pread(0, min(source.size, limits.pickle_bytes))
    pickles: list[Pickle] = []
    for _ in range(5):
        position = pickles[-1].end if pickles else 0
        pickles.append(read_pickle(data, position, limits=limits, where=source.name))
    return pickles


def _require_little_endian(source: ByteSource, system: Value) -> None:
    facts = [value for key, value in dict_pairs(system) or [] if key == "little_endian"]
    if facts == [False]:
        raise InputError(
            "was written in 'big' byte order",
            where=source.name,
            expected="little-endian storages",
            action="Load it and save it again on a little-endian machine",
        )
    if facts != [True]:
        raise _error(source, "does not say its byte order")


def _storages(source: ByteSource, root: Pickle, keys: Pickle) -> dict[str, StorageRef]:
    """Locate the storages behind the keys, in the keys' order, up to the end of the file."""
    try:
        itemsizes = storage_itemsizes(root.persistent)
    except UnreadableTensor as error:
        raise _error(source, f"a storage {error}") from None
    if not isinstance(keys.value, list):
        raise _error(source, "has no list of storage keys")
    found: dict[str, StorageRef] = {}
    position = keys.end
    for key in keys.value:
        if not isinstance(key, str) or key not in itemsizes or key in found:
            raise _error(source, f"lists the storage {label(key)}, which no tensor names, or twice")
        count = _count(source, position, key)
        position += _COUNT.size
        found[key] = StorageRef(key, "", position, count * itemsizes[key])
        position += found[key].nbytes
        if position > source.size:
            raise _error(source, f"is cut short inside the storage {label(key)}")
    if position != source.size:
        raise _error(source, f"has {source.size - position} bytes behind its last storage")
    return found


def _count(source: ByteSource, position: int, key: str) -> int:
    if position + _COUNT.size > source.size:
        raise _error(source, f"is cut short before the storage {label(key)}")
    count: int = _COUNT.unpack(source.pread(position, _COUNT.size))[0]
    if count < 0:
        raise _error(source, f"has a negative size for the storage {label(key)}")
    return count


def _part(storages: dict[str, StorageRef], storage: Storage) -> StorageRef:
    """Return the bytes of a storage, or of the part of it that an old file calls a view."""
    whole = storages.get(storage.key)
    if whole is None:
        raise UnreadableTensor("lies in a storage that the file does not list")
    itemsize = ITEMSIZE[storage.dtype]
    if whole.nbytes != storage.elements * itemsize:
        raise UnreadableTensor(
            f"lies in a storage of {storage.elements * itemsize} bytes, but it has {whole.nbytes}"
        )
    if storage.window is None:
        return whole
    first, count = storage.window
    return replace(whole, file_offset=whole.file_offset + first * itemsize, nbytes=count * itemsize)


def _error(source: ByteSource, what: str) -> InputError:
    return InputError(
        what,
        where=source.name,
        expected="a complete checkpoint in torch's form before 1.6",
        action="Fetch the file again, or save it again with torch.save",
    )

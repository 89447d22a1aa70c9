"""Fuzz target: the pickle machine and the walks over what it reads.

A pickle that it accepts, and that names no global, must have the value that Python's own pickle
gives it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from checkpoint_invariants import LIMITS

from sam3d_gguf.extractors.object_tree import ObjectTree
from sam3d_gguf.extractors.pickle_machine import Dict, Object, Persistent, Pickle, Set, read_pickle
from sam3d_gguf.extractors.survey import Survey
from sam3d_gguf.extractors.tensor_ref import ITEMSIZE, StorageRef
from sam3d_gguf.extractors.torch_objects import Storage
from sam3d_gguf.schemas.errors import Sam3dError


def one_input(data: bytes) -> None:
    """Reads data as a pickle; raises anything but a refusal only where it is wrong."""
    try:
        found = read_pickle(data, limits=LIMITS)
    except Sam3dError:
        return
    walk(found)
    if not found.globals and not found.persistent:
        compare(found, data)


def walk(found: Pickle) -> None:
    """Names tensors both ways and surveys the rest."""
    tree = ObjectTree("input", LIMITS)
    for add in (tree.add_state_dict, tree.add_module, tree.add_constants):
        try:
            add(found.value, locate)
        except Sam3dError:
            continue
    try:
        Survey({"": found}, tree.wanted, limits=LIMITS, where="input")
    except Sam3dError:
        return


def locate(storage: Storage) -> StorageRef:
    """Any storage is there."""
    return StorageRef(storage.key, "", 0, storage.elements * ITEMSIZE[storage.dtype])


class _Unpickler(pickle.Unpickler):
    """Python's unpickler without globals, so that it makes no call."""

    def find_class(self, _module: str, _name: str, /) -> NoReturn:
        raise AssertionError("a global that the machine did not see")


def compare(found: Pickle, data: bytes) -> None:
    """Python accepts the pickle with the same value, or stumbles over what the machine need not."""
    try:
        theirs: object = _Unpickler(io.BytesIO(data), encoding="utf-8").load()
    except (TypeError, ValueError, AttributeError, pickle.UnpicklingError, MemoryError, EOFError):
        return
    pending: list[tuple[object, object]] = [(found.value, theirs)]
    seen: set[tuple[int, int]] = set()
    while pending:
        ours, other = pending.pop()
        if (id(ours), id(other)) in seen:
            continue
        seen.add((id(ours), id(other)))
        pending += parts(ours, other)


def parts(ours: object, other: Any) -> list[tuple[object, object]]:
    """Compare two values on their own, and return their parts in pairs."""
    if isinstance(ours, Dict):
        assert isinstance(other, dict)
        last = {key: value for key, value in ours.pairs if isinstance(key, str | int | bytes)}
        return [(value, other[key]) for key, value in last.items()]
    if isinstance(ours, Set):
        assert isinstance(other, set | frozenset)
        return []
    if isinstance(ours, list | tuple):
        mine = cast("Sequence[object]", ours)
        assert type(other) is type(mine)
        return list(zip(mine, other, strict=True))
    assert not isinstance(ours, Object | Persistent)
    assert repr(ours) == repr(bytes(other) if isinstance(other, bytearray) else other)
    return []

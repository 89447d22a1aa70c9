"""Names for the tensors and plain values of a checkpoint's object tree.

A state dict names its tensors by its keys; a TorchScript module by their attribute paths. Walks are
bounded: each step is counted, since an object that is shared is reached by many paths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from sam3d_gguf.extractors.describe import describe, label, summary
from sam3d_gguf.extractors.limits import Limits
from sam3d_gguf.extractors.pickle_machine import Value
from sam3d_gguf.extractors.survey import Excluded
from sam3d_gguf.extractors.tensor_ref import ITEMSIZE, StorageRef, TensorRef
from sam3d_gguf.extractors.torch_objects import (
    SparseCoo,
    Storage,
    TensorView,
    UnreadableTensor,
    dict_pairs,
    is_module,
    is_tensor,
    read_tensor,
    untagged,
)
from sam3d_gguf.schemas.errors import InputError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Locate: TypeAlias = Callable[[Storage], StorageRef]
"""Finds a storage's bytes; raises UnreadableTensor where the file does not hold them."""
_Pairs: TypeAlias = "list[tuple[Value, Value]]"

_WRAPPERS = ("state_dict", "model")
_CONFIG = "model_config"
_KEYS_SHOWN = 8
_MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Content:
    """Something beside the tensors: where it hangs, what it is, its beginning as text."""

    path: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Sparse:
    """A sparse COO tensor, whose two parts are tensors named `<name>.indices` and `.values`."""

    name: str
    shape: tuple[int, ...]


class ObjectTree:
    """Collects what the walk of one checkpoint finds.

    Args:
        where: what to call the file in errors.
        limits: bounds of the walk.

    Attributes:
        tensors: by name, in file order.
        constants: of a TorchScript archive, named as its code does: `CONSTANTS.c0`.
        sparse: the COO tensors among `tensors`.
        attributes: plain values of a TorchScript module, by attribute path; of a checkpoint, the
            `model_config` beside its state dict.
        content: other values that a state dict or module holds.
        excluded: constants that can't be read.
        wanted: the `id` of each tensor call that was named or excluded.
    """

    def __init__(self, where: str, limits: Limits) -> None:
        self.tensors: dict[str, TensorRef] = {}
        self.constants: dict[str, TensorRef] = {}
        self.sparse: list[Sparse] = []
        self.attributes: dict[str, Json] = {}
        self.content: list[Content] = []
        self.excluded: list[Excluded] = []
        self.wanted: set[int] = set()
        self._where = where
        self._limits = limits
        self._steps = 0
        self._nbytes = 0

    def add_state_dict(self, root: Value, locate: Locate) -> str:
        """Name the tensors of a state dict, and return its wrapper.

        A dictionary of tensors under `state_dict` or `model` is the state dict, else the root is
        ("flat").

        Raises:
            InputError: there is no state dict, there are two, or a tensor of it can't be read.
        """
        pairs = dict_pairs(root)
        if pairs is None:
            raise self._error(
                f"holds {describe(root)}, not a state dict",
                "Save the model's state_dict() with torch.save",
            )
        wrapper, wrapped = self._unwrap(pairs)
        if wrapper != "flat":
            for key, value in pairs:
                if key == _CONFIG and self._is_plain(value, _CONFIG):
                    self._add_attribute(_CONFIG, value)
                elif key != wrapper:
                    self._report(key, value)
        self._add_named(wrapped, locate)
        return wrapper

    def add_module(self, root: Value, locate: Locate) -> None:
        """Name the tensors and plain values of a TorchScript module by attribute path.

        Raises:
            InputError: the root is no module, or a tensor of it can't be read.
        """
        if not is_module(root):
            raise self._error(f"holds {describe(root)}, not a TorchScript module")
        self._walk(root, "", (), locate)

    def add_constants(self, root: Value, locate: Locate) -> None:
        """Name the tensors that a TorchScript archive's code refers to; none of them is required.

        Raises:
            InputError: there are too many.
        """
        items = root if isinstance(root, list | tuple) else (root,)
        for index, value in enumerate(items):
            name = f"CONSTANTS.c{index}"
            if is_tensor(value):
                self._add_constant(name, value, locate)
            else:
                self._report(name, value)

    def shared(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the tensors that view one storage, for each such storage."""
        groups: dict[StorageRef, list[str]] = {}
        for tensor in (*self.tensors.values(), *self.constants.values()):
            groups.setdefault(tensor.storage, []).append(tensor.name)
        return tuple(tuple(sorted(names)) for names in groups.values() if len(names) > 1)

    # State dicts

    def _unwrap(self, pairs: _Pairs) -> tuple[str, _Pairs]:
        found: list[tuple[str, _Pairs]] = []
        for key, value in pairs:
            if isinstance(key, str) and key in _WRAPPERS:
                inner = dict_pairs(value)
                if inner is not None and _holds_tensors(inner):
                    found.append((key, inner))
        if len(found) > 1:
            raise self._error(
                f"holds several state dicts: {', '.join(key for key, _ in found)}",
                "Save the one that is meant in a file of its own",
            )
        if not found and not _holds_tensors(pairs):
            keys = ", ".join(label(key) for key, _ in pairs[:_KEYS_SHOWN]) or "none"
            raise self._error(
                f"holds no tensors at its top, under 'state_dict' or under 'model'; keys: {keys}",
                "Save the model's state_dict() with torch.save",
            )
        return found[0] if found else ("flat", pairs)

    def _add_named(self, pairs: _Pairs, locate: Locate) -> None:
        names: set[str] = set()
        for key, value in pairs:
            if not isinstance(key, str):
                raise self._error(f"has the key {label(key)}, which is not text")
            if key in names:
                raise self._error(f"has the key {label(key)} twice")
            names.add(key)
            if is_tensor(value):
                self._add_tensor(key, value, locate)
            else:
                self._report(key, value)

    # TorchScript modules

    def _walk(self, value: Value, path: str, above: tuple[int, ...], locate: Locate) -> None:
        self._step(path, len(above))
        value = untagged(value)
        if id(value) in above:
            self._add_content(Content(path, "cycle", "to an object above it"))
        elif is_tensor(value):
            self._add_tensor(path, value, locate)
        elif self._is_plain(value, path):
            self._add_attribute(path, value)
        elif (parts := _parts(value)) is not None:
            for name, part in parts:
                inner = f"{path}.{name}" if path else name
                self._walk(part, inner, (*above, id(value)), locate)
        else:
            self._report(path, value)

    def _is_plain(self, value: Value, path: str) -> bool:
        """Whether JSON can say the value: scalars, and lists and dictionaries of such."""
        pending: list[tuple[Value, int]] = [(value, 0)]
        while pending:
            item, depth = pending.pop()
            self._step(path, 0)
            item = untagged(item)
            inner = dict_pairs(item)
            if isinstance(item, list | tuple):
                pending.extend((part, depth + 1) for part in item)
            elif inner is not None and all(isinstance(key, str) for key, _ in inner):
                pending.extend((part, depth + 1) for _, part in inner)
            elif not _is_scalar(item):
                return False
            if depth > self._limits.nesting:
                return False
        return True

    def _add_attribute(self, path: str, value: Value) -> None:
        if path in self.attributes:
            raise self._error(f"has the attribute {label(path)} twice")
        if len(self.attributes) == self._limits.entries:
            raise self._error(f"has more than {self._limits.entries} attributes")
        self.attributes[path] = _json(value)

    # Tensors

    def _add_tensor(self, name: str, value: Value, locate: Locate) -> None:
        self.wanted.add(id(value))
        try:
            for suffix, view in self._views(name, value):
                self._place(name + suffix, view, locate)
        except UnreadableTensor as error:
            raise InputError(
                f"the tensor {label(name)} {error}",
                where=self._where,
                expected=f"a dense or COO tensor of {', '.join(sorted(ITEMSIZE))}",
            ) from None

    def _views(self, name: str, value: Value) -> list[tuple[str, TensorView]]:
        tensor = read_tensor(value, self._limits)
        if isinstance(tensor, SparseCoo):
            self.sparse.append(Sparse(name, tensor.shape))
            return [(".indices", tensor.indices), (".values", tensor.values)]
        return [("", tensor)]

    def _place(self, name: str, view: TensorView, locate: Locate) -> None:
        if not name or len(name) > self._limits.name_characters or not name.isprintable():
            raise self._error(f"has the tensor name {label(name)}, which is not printable text")
        if name in self.tensors:
            raise self._error(f"has the tensor {label(name)} twice")
        if len(self.tensors) == self._limits.tensors:
            raise self._error(f"has more than {self._limits.tensors} tensors")
        tensor = _located(name, view, locate)
        self._nbytes += tensor.nbytes
        if self._nbytes > self._limits.tensor_bytes:
            raise self._error(f"has tensors of more than {self._limits.tensor_bytes} bytes")
        self.tensors[name] = tensor

    def _add_constant(self, name: str, value: Value, locate: Locate) -> None:
        if len(self.constants) + len(self.excluded) == self._limits.tensors:
            raise self._error(f"has more than {self._limits.tensors} tensors among its constants")
        self.wanted.add(id(value))
        try:
            view = read_tensor(value, self._limits)
            if isinstance(view, SparseCoo):
                raise UnreadableTensor("is sparse")
            self.constants[name] = _located(name, view, locate)
        except UnreadableTensor as error:
            self.excluded.append(Excluded(name, str(error)))

    # Reports and bounds

    def _report(self, key: Value, value: Value) -> None:
        short = isinstance(key, str) and len(key) <= self._limits.name_characters
        path = str(key) if short and str(key).isprintable() else label(key)
        self._add_content(Content(path, *summary(value)))

    def _add_content(self, content: Content) -> None:
        if len(self.content) == self._limits.entries:
            raise self._error(f"has more than {self._limits.entries} values beside its tensors")
        self.content.append(content)

    def _step(self, path: str, depth: int) -> None:
        self._steps += 1
        if self._steps > self._limits.steps:
            raise self._error(f"has more than {self._limits.steps} paths to its objects")
        if depth > self._limits.nesting or len(path) > self._limits.name_characters:
            raise self._error(f"nests its objects too deeply at {label(path)}")

    def _error(self, what: str, action: str = "") -> InputError:
        return InputError(
            what, where=self._where, expected="a state dict of tensors", action=action
        )


def _holds_tensors(pairs: _Pairs) -> bool:
    return any(is_tensor(value) for _, value in pairs)


def _located(name: str, view: TensorView, locate: Locate) -> TensorRef:
    storage = locate(view.storage)
    return TensorRef(name, view.dtype, view.shape, view.strides, storage, view.storage_offset)


def _parts(value: Value) -> Iterable[tuple[str, Value]] | None:
    """Return what an attribute path continues into, None where it ends."""
    if is_module(value):
        return [part for state in value.states for part in _state_parts(state)]
    if isinstance(value, list | tuple):
        return ((str(index), item) for index, item in enumerate(value))
    return _entries(value)


def _state_parts(state: Value) -> list[tuple[str, Value]]:
    entries = _entries(state)
    return [("state", state)] if entries is None else entries


def _entries(value: Value) -> list[tuple[str, Value]] | None:
    pairs = dict_pairs(value)
    if pairs is None:
        return None
    return [(key if isinstance(key, str) else label(key), item) for key, item in pairs]


def _is_scalar(value: Value) -> bool:
    if isinstance(value, int):
        return -_MAX_INTEGER <= value <= _MAX_INTEGER
    return value is None or isinstance(value, float | str)


def _json(value: Value) -> Json:
    """Return a plain value as JSON's types; a number that JSON lacks becomes its name."""
    value = untagged(value)
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if (pairs := dict_pairs(value)) is not None:
        return {str(key): _json(item) for key, item in pairs}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str) else None

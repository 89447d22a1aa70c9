"""The few calls in a torch pickle that have a meaning: those that rebuild a tensor.

The forms are those that torch has written since 1.0 (`torch/_utils.py`, `torch/_tensor.py`,
`torch/serialization.py` and the TorchScript pickler). They are data here: a table from a global's
name to the way in which its recorded arguments describe a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeGuard

from sam3d_gguf.extractors.limits import Limits
from sam3d_gguf.extractors.pickle_machine import Dict, Global, Object, Persistent, Value
from sam3d_gguf.extractors.printable import printable, quoted
from sam3d_gguf.extractors.tensor_ref import ITEMSIZE

_MAX_INTEGER = 2**63 - 1
_WRAPPERS = 4  # a parameter of a subclass of a tensor; more is no file of torch's


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage as a tensor names it.

    Attributes:
        key: torch's name for the stored bytes.
        dtype: that of its elements, U8 if it is untyped.
        elements: how many it has.
        window: (first element, number of elements) of the part that is meant, in legacy files.
    """

    key: str
    dtype: str
    elements: int
    window: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class TensorView:
    """A dense tensor as a view of a storage; see `TensorRef` for the terms."""

    storage: Storage
    dtype: str
    storage_offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements the tensor has."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Elements from the storage's start to just past the last one that the view touches."""
        if self.elements == 0:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return self.storage_offset + last + 1


@dataclass(frozen=True, slots=True)
class SparseCoo:
    """A sparse COO tensor: `indices` [dimensions, entries] I64, `values` [entries, ...]."""

    indices: TensorView
    values: TensorView
    shape: tuple[int, ...]


class UnreadableTensor(Exception):
    """Why a call that rebuilds a tensor doesn't describe one that can be read."""


_STORAGES: Mapping[str, str] = MappingProxyType(
    {
        "BFloat16Storage": "BF16",
        "HalfStorage": "F16",
        "FloatStorage": "F32",
        "DoubleStorage": "F64",
        "CharStorage": "I8",
        "ShortStorage": "I16",
        "IntStorage": "I32",
        "LongStorage": "I64",
        "ByteStorage": "U8",
        "BoolStorage": "BOOL",
    }
)
_UNREADABLE_STORAGES: Mapping[str, int] = MappingProxyType(
    {
        "ComplexHalfStorage": 4,
        "ComplexFloatStorage": 8,
        "ComplexDoubleStorage": 16,
        "QInt8Storage": 1,
        "QUInt8Storage": 1,
        "QInt32Storage": 4,
        "QUInt4x2Storage": 1,
        "QUInt2x4Storage": 1,
    }
)
_UNTYPED = frozenset(
    f"{module}.{name}"
    for module in ("torch", "torch.storage")
    for name in ("UntypedStorage", "_UntypedStorage", "TypedStorage", "_TypedStorage")
)
_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "torch.bfloat16": "BF16",
        "torch.float16": "F16",
        "torch.float32": "F32",
        "torch.float64": "F64",
        "torch.int8": "I8",
        "torch.int16": "I16",
        "torch.int32": "I32",
        "torch.int64": "I64",
        "torch.uint8": "U8",
        "torch.bool": "BOOL",
    }
)
_UNREADABLE: Mapping[str, str] = MappingProxyType(
    {
        "torch._utils._rebuild_qtensor": "is quantized",
        "torch._utils._rebuild_meta_tensor_no_storage": "is a meta tensor, without elements",
        "torch._utils._rebuild_nested_tensor": "is a nested tensor",
        "torch._utils._rebuild_wrapper_subclass": "is a wrapper without elements of its own",
        "torch._utils._rebuild_device_tensor_from_numpy": "is a NumPy copy of another device's",
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": "is a copy of another device's",
        "torch._utils._rebuild_xla_tensor": "is a copy of another device's",
    }
)
_ORDERED_DICT = "collections.OrderedDict"
_TAGS = frozenset(
    f"torch.jit._pickle.{name}"
    for name in (
        "restore_type_tag",
        "build_intlist",
        "build_doublelist",
        "build_boollist",
        "build_tensorlist",
    )
)
_MODULE = "__torch__."
_LAYOUT, _SIZE = "torch.serialization._get_layout", "torch.Size"


def dict_pairs(value: Value) -> list[tuple[Value, Value]] | None:
    """Return the entries of a dictionary or an OrderedDict, None for anything else."""
    if isinstance(value, Dict):
        return value.pairs
    if not isinstance(value, Object) or _called(value) != _ORDERED_DICT:
        return None
    pairs: list[tuple[Value, Value]] = []
    for argument in value.arguments:
        for entry in argument if isinstance(argument, list | tuple) else [None]:
            if not isinstance(entry, list | tuple) or len(entry) != 2:
                return None
            pairs.append((entry[0], entry[1]))
    return pairs + value.pairs


def is_tensor(value: Value) -> TypeGuard[Object]:
    """Whether the value is a call that would rebuild a tensor, a readable one or not."""
    if not isinstance(value, Object):
        return False
    called = _called(value)
    return called in _REBUILDERS or called in _UNREADABLE


def is_known(value: Object) -> bool:
    """Whether the call is part of a form that torch writes."""
    return is_tensor(value) or _called(value) in _PLAIN_CALLS


def has_meaning(name: str) -> bool:
    """Whether a global's name is one that torch writes, whatever it is used for."""
    return name in _MEANINGS or name.startswith(_MODULE)


def is_module(value: Value) -> TypeGuard[Object]:
    """Whether the value is an object of a class that a TorchScript archive's code defines."""
    return isinstance(value, Object) and _called(value).startswith(_MODULE)


def untagged(value: Value) -> Value:
    """Return the value of TorchScript's type-tag and list calls, anything else as it is."""
    while isinstance(value, Object) and value.arguments and _called(value) in _TAGS:
        value = value.arguments[0]
    return value


def is_storage(value: Value) -> bool:
    """Whether the value is a storage that no tensor views."""
    match value:
        case Persistent(id=("storage", *_)):
            return True
        case _:
            return False


def storage_itemsizes(values: Iterable[Persistent]) -> dict[str, int]:
    """Return the bytes of one element for each storage key, of dtypes without a reader too.

    Raises:
        UnreadableTensor: a storage is of an unknown type, or of two types.
    """
    sizes: dict[str, int] = {}
    for value in values:
        match value.id:
            case ("storage", Global() as kind, str() as key, *_):
                size = _UNREADABLE_STORAGES.get(kind.name) or ITEMSIZE[_storage_dtype(kind)]
                if sizes.setdefault(key, size) != size:
                    raise UnreadableTensor(f"{quoted(key)} is of two element sizes")
            case _:
                pass
    return sizes


def read_tensor(value: Value, limits: Limits) -> TensorView | SparseCoo:
    """Return the tensor that a call describes; `is_tensor(value)` must hold.

    Raises:
        UnreadableTensor: its form, dtype, layout or view is not one that can be read.
    """
    return _read(value, limits, _WRAPPERS)


def _called(value: Object) -> str:
    return str(value.function) if isinstance(value.function, Global) else ""


def _read(value: Value, limits: Limits, depth: int) -> TensorView | SparseCoo:
    if not is_tensor(value):
        raise UnreadableTensor("wraps something that is not a tensor")
    called = _called(value)
    if called in _UNREADABLE:
        raise UnreadableTensor(_UNREADABLE[called])
    if value.states or value.items or value.pairs:
        raise UnreadableTensor("is changed after it was rebuilt")
    if depth == 0:
        raise UnreadableTensor("is wrapped too often")
    return _REBUILDERS[called](value.arguments, limits, depth - 1)


def _tensor(arguments: tuple[Value, ...], limits: Limits, _depth: int) -> TensorView:
    """`_rebuild_tensor(storage, storage_offset, size, stride)`"""
    if len(arguments) != 4:
        raise UnreadableTensor("is rebuilt from another number of arguments than torch writes")
    storage = _storage(arguments[0])
    return _view(storage, storage.dtype, arguments[1:], limits)


def _tensor_v2(arguments: tuple[Value, ...], limits: Limits, depth: int) -> TensorView:
    """`_rebuild_tensor_v2(*_rebuild_tensor's, requires_grad, backward_hooks, metadata)`"""
    if len(arguments) not in (6, 7):
        raise UnreadableTensor("is rebuilt from another number of arguments than torch writes")
    _require_plain(arguments[6:])
    return _tensor(arguments[:4], limits, depth)


def _tensor_v3(arguments: tuple[Value, ...], limits: Limits, _depth: int) -> TensorView:
    """`_rebuild_tensor_v3(*_rebuild_tensor_v2's without metadata, dtype, metadata)`"""
    if len(arguments) not in (7, 8):
        raise UnreadableTensor("is rebuilt from another number of arguments than torch writes")
    _require_plain(arguments[7:])
    dtype = str(arguments[6]) if isinstance(arguments[6], Global) else ""
    if dtype not in _DTYPES:
        raise UnreadableTensor(
            f"has the dtype {printable(dtype) or 'of no name'}, which is not supported"
        )
    return _view(_storage(arguments[0]), _DTYPES[dtype], arguments[1:4], limits)


def _parameter(arguments: tuple[Value, ...], limits: Limits, depth: int) -> TensorView | SparseCoo:
    """`_rebuild_parameter(data, requires_grad, backward_hooks)`, and with a last `state`"""
    if len(arguments) not in (3, 4):
        raise UnreadableTensor("is rebuilt from another number of arguments than torch writes")
    return _read(arguments[0], limits, depth)


def _from_type(arguments: tuple[Value, ...], limits: Limits, depth: int) -> TensorView | SparseCoo:
    """`_rebuild_from_type_v2(func, new_type, args, state)`: a tensor of a subclass"""
    match arguments:
        case (Global() as function, Global(), tuple() as inner, _):
            return _read(Object(function, inner), limits, depth)
        case _:
            raise UnreadableTensor("is of a subclass that is rebuilt in an unknown way")


def _sparse(arguments: tuple[Value, ...], limits: Limits, depth: int) -> SparseCoo:
    """`_rebuild_sparse_tensor(layout, (indices, values, size, is_coalesced))`"""
    match arguments:
        case (
            Object(function=Global() as get_layout, arguments=(str() as layout,)),
            tuple() as data,
        ):
            if str(get_layout) != _LAYOUT or layout != "torch.sparse_coo":
                raise UnreadableTensor(
                    f"has the layout {printable(layout)}, which is not supported"
                )
        case _:
            raise UnreadableTensor("is sparse in an unknown way")
    if len(data) not in (3, 4):
        raise UnreadableTensor("is sparse in an unknown way")
    shape = _integers(data[2], "size", limits)
    indices, values = (_read(part, limits, depth) for part in data[:2])
    if not isinstance(indices, TensorView) or not isinstance(values, TensorView):
        raise UnreadableTensor("is sparse in an unknown way")
    _require_coo(indices, values, shape)
    return SparseCoo(indices, values, shape)


def _require_coo(indices: TensorView, values: TensorView, shape: tuple[int, ...]) -> None:
    if indices.dtype != "I64" or len(indices.shape) != 2 or not values.shape:
        raise UnreadableTensor("is sparse with indices that are not a matrix of I64")
    dimensions, entries = indices.shape
    if values.shape != (entries, *shape[dimensions:]) or dimensions > len(shape):
        raise UnreadableTensor("is sparse with indices, values and a shape that disagree")


def _storage(value: Value) -> Storage:
    match value:
        case Persistent(id=("storage", Global() as kind, str() as key, _, int() as count, *rest)):
            storage = Storage(key, _storage_dtype(kind), _integer(count, "storage size"))
        case _:
            raise UnreadableTensor("views something that is not a storage")
    match rest:
        case [] | [None]:
            return storage
        case [(str(), int() as first, int() as count)]:
            window = (_integer(first, "storage view"), _integer(count, "storage view"))
            if sum(window) > storage.elements:
                raise UnreadableTensor("views a part of its storage that reaches outside of it")
            return replace(storage, window=window)
        case _:
            raise UnreadableTensor("views a part of its storage in an unknown way")


def _storage_dtype(kind: Global) -> str:
    if str(kind) in _UNTYPED:
        return "U8"
    if kind.module != "torch" or kind.name not in _STORAGES:
        raise UnreadableTensor(f"lies in a {printable(str(kind))}, whose dtype is not supported")
    return _STORAGES[kind.name]


def _view(storage: Storage, dtype: str, place: tuple[Value, ...], limits: Limits) -> TensorView:
    offset, size, stride = place
    view = TensorView(
        storage,
        dtype,
        _integer(offset, "offset"),
        _integers(size, "size", limits),
        _integers(stride, "stride", limits),
    )
    if len(view.shape) != len(view.strides):
        raise UnreadableTensor("has another number of strides than dimensions")
    elements = storage.window[1] if storage.window else storage.elements
    available = elements * ITEMSIZE[storage.dtype]
    if view.end * ITEMSIZE[dtype] > available:
        raise UnreadableTensor(
            f"views {view.end * ITEMSIZE[dtype]} bytes of a storage of {available}"
        )
    return view


def _integers(value: Value, what: str, limits: Limits) -> tuple[int, ...]:
    match value:
        case Object(function=Global() as size, arguments=(tuple() as inner,)) if str(size) == _SIZE:
            value = inner
        case _:
            pass
    if not isinstance(value, tuple | list) or len(value) > limits.dimensions:
        raise UnreadableTensor(f"has a {what} that is not at most {limits.dimensions} integers")
    return tuple(_integer(item, what) for item in value)


def _integer(value: Value, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INTEGER:
        raise UnreadableTensor(f"has a {what} that is negative, too large or no integer")
    return value


def _require_plain(metadata: tuple[Value, ...]) -> None:
    """Refuse the lazy conjugation and negation bits: the stored elements are not the values."""
    for value in metadata:
        pairs = dict_pairs(value)
        if value is not None and (pairs is None or any(bit is not False for _, bit in pairs)):
            raise UnreadableTensor("is stored conjugated or negated")


_Rebuilder = Callable[[tuple[Value, ...], Limits, int], TensorView | SparseCoo]
_REBUILDERS: Mapping[str, _Rebuilder] = MappingProxyType(
    {
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor_v2,
        "torch._utils._rebuild_tensor_v3": _tensor_v3,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._utils._rebuild_sparse_tensor": _sparse,
        "torch._tensor._rebuild_from_type": _from_type,
        "torch._tensor._rebuild_from_type_v2": _from_type,
        "torch.tensor._rebuild_from_type": _from_type,
    }
)
_PLAIN_CALLS = _TAGS | {_ORDERED_DICT, _LAYOUT, _SIZE, "torch.device"}
_MEANINGS = (
    _PLAIN_CALLS
    | _REBUILDERS.keys()
    | _UNREADABLE.keys()
    | _DTYPES.keys()
    | _UNTYPED
    | {f"torch.{name}" for name in (*_STORAGES, *_UNREADABLE_STORAGES)}
)

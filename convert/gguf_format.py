"""The GGUF format's terms, limits and encodings, shared by reader, writer and digests.

GGUF version 3, little endian: magic, version, number of tensors, number of key/values; the
key/values; the tensor infos; padding to the alignment; the tensors' data, each padded to it.
Limits marked "ours" are this project's bounds on hostile files; the others are the format's or
GGML's.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from sam3d_gguf.schemas.errors import InputError

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 4096  # ours
MAX_HEADER_BYTES = 64 << 20  # ours
MAX_METADATA = 1 << 16  # ours
MAX_TENSORS = 1 << 16  # ours
MAX_KEY_BYTES = (1 << 16) - 1
MAX_STRING_BYTES = 16 << 20  # ours
MAX_ITEMS = 1 << 21  # ours: array items of all key/values together
MAX_ARRAYS = 1 << 15  # ours: arrays inside arrays, of all key/values together
MAX_ARRAY_DEPTH = 4  # ours
MAX_NAME_BYTES = 63
MAX_RANK = 4
MAX_BYTES = (1 << 63) - 1

_KEY = re.compile(r"[a-z0-9_]+(?:\.[a-z0-9_]+)*")


class ValueType(IntEnum):
    """Types of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


class GgmlType(IntEnum):
    """Tensor types that GGML stores in files."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


BLOCKS: Mapping[GgmlType, tuple[int, int]] = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20),
    GgmlType.Q5_0: (32, 22),
    GgmlType.Q5_1: (32, 24),
    GgmlType.Q8_0: (32, 34),
    GgmlType.Q8_1: (32, 36),
    GgmlType.Q2_K: (256, 84),
    GgmlType.Q3_K: (256, 110),
    GgmlType.Q4_K: (256, 144),
    GgmlType.Q5_K: (256, 176),
    GgmlType.Q6_K: (256, 210),
    GgmlType.Q8_K: (256, 292),
    GgmlType.IQ2_XXS: (256, 66),
    GgmlType.IQ2_XS: (256, 74),
    GgmlType.IQ3_XXS: (256, 98),
    GgmlType.IQ1_S: (256, 50),
    GgmlType.IQ4_NL: (32, 18),
    GgmlType.IQ3_S: (256, 110),
    GgmlType.IQ2_S: (256, 82),
    GgmlType.IQ4_XS: (256, 136),
    GgmlType.I8: (1, 1),
    GgmlType.I16: (1, 2),
    GgmlType.I32: (1, 4),
    GgmlType.I64: (1, 8),
    GgmlType.F64: (1, 8),
    GgmlType.IQ1_M: (256, 56),
    GgmlType.BF16: (1, 2),
    GgmlType.TQ1_0: (256, 54),
    GgmlType.TQ2_0: (256, 66),
    GgmlType.MXFP4: (32, 17),
    GgmlType.NVFP4: (64, 36),
    GgmlType.Q1_0: (128, 18),
    GgmlType.Q2_0: (64, 18),
}
"""Elements and bytes of one block of each type; rows (the last PyTorch dimension) are whole blocks."""

SCALAR_FORMATS: Mapping[ValueType, str] = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
"""`struct` formats of the fixed-size value types, to be used little endian."""

Scalar: TypeAlias = bool | int | float | str


@dataclass(frozen=True, slots=True)
class GgufValue:
    """A metadata value with its type; an array's value is a tuple of `item_type` items.

    The items of an array of arrays are themselves values of type ARRAY.
    """

    type: ValueType
    value: Scalar | tuple[Scalar, ...] | tuple[GgufValue, ...]
    item_type: ValueType | None = None


@dataclass(frozen=True, slots=True)
class GgufTensorSpec:
    """What a tensor info says but the offset: name, PyTorch (C-order) shape, GGML type."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file: name, PyTorch (C-order) shape, GGML type, and its bytes in the file.

    `offset` counts from the start of the file, not of the data section.
    """

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    nbytes: int


def uint32(value: int) -> GgufValue:
    """Returns a UINT32 value."""
    return GgufValue(ValueType.UINT32, value)


def uint64(value: int) -> GgufValue:
    """Returns a UINT64 value."""
    return GgufValue(ValueType.UINT64, value)


def float32(value: float) -> GgufValue:
    """Returns a FLOAT32 value, rounded to what the file can hold."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return GgufValue(ValueType.FLOAT32, rounded)


def float64(value: float) -> GgufValue:
    """Returns a FLOAT64 value."""
    return GgufValue(ValueType.FLOAT64, value)


def boolean(value: bool) -> GgufValue:
    """Returns a BOOL value."""
    return GgufValue(ValueType.BOOL, value)


def string(value: str) -> GgufValue:
    """Returns a STRING value."""
    return GgufValue(ValueType.STRING, value)


def array(item_type: ValueType, items: Iterable[Scalar]) -> GgufValue:
    """Returns an ARRAY value of scalars or strings."""
    if item_type is ValueType.FLOAT32:
        items = [struct.unpack("<f", struct.pack("<f", item))[0] for item in items]
    return GgufValue(ValueType.ARRAY, tuple(items), item_type)


def align(offset: int, alignment: int) -> int:
    """Returns the next multiple of alignment, at or after offset."""
    return -(-offset // alignment) * alignment


def check_key(key: str, where: str) -> None:
    """Checks a metadata key: dot-separated segments of lower-case ASCII letters, digits, '_'.

    Raises:
        InputError: it isn't one, or is too long.
    """
    if len(key) > MAX_KEY_BYTES:
        raise InputError(
            f"the key has {len(key)} bytes", where=where, expected=f"at most {MAX_KEY_BYTES}"
        )
    if not _KEY.fullmatch(key):
        raise InputError(
            f"the key {key[:80]!r} isn't a valid one",
            where=where,
            expected="segments of a-z, 0-9 and '_', separated by '.'",
        )


def check_alignment(value: GgufValue | None, where: str) -> int:
    """Returns the alignment that the value of `general.alignment`, or its absence, asks for.

    Raises:
        InputError: not UINT32, not a power of two from 8 on, or larger than is accepted.
    """
    if value is None:
        return DEFAULT_ALIGNMENT
    alignment = value.value
    if value.type is not ValueType.UINT32 or not isinstance(alignment, int):
        raise InputError(
            f"{ALIGNMENT_KEY} is of type {value.type.name}", where=where, expected="UINT32"
        )
    if alignment % 8 or alignment & (alignment - 1) or not 0 < alignment <= MAX_ALIGNMENT:
        raise InputError(
            f"{ALIGNMENT_KEY} is {alignment}",
            where=where,
            expected=f"a power of two from 8 to {MAX_ALIGNMENT}",
        )
    return alignment


def check_name(name: bytes, where: str) -> str:
    """Returns a tensor's name.

    Raises:
        InputError: empty, longer than GGML takes, not UTF-8, or with a NUL.
    """
    if not 0 < len(name) <= MAX_NAME_BYTES:
        raise InputError(
            f"the tensor name has {len(name)} bytes",
            where=where,
            expected=f"1 to {MAX_NAME_BYTES}, as GGML has it",
        )
    if b"\0" in name:
        raise InputError(
            "the tensor name has a NUL character",
            where=where,
            expected="none: GGML would cut there",
        )
    return decode_text(name, where)


def decode_text(data: bytes, where: str) -> str:
    """Returns a string.

    Raises:
        InputError: it isn't UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"byte {error.start} of a string isn't UTF-8", where=where, expected="UTF-8"
        ) from error


def tensor_bytes(shape: Sequence[int], ggml_type: GgmlType, where: str) -> int:
    """Returns the bytes of a tensor's data.

    Args:
        shape: PyTorch order; the last dimension is the row that blocks divide.
        ggml_type: its GGML type.
        where: what errors call the tensor.

    Raises:
        InputError: the rank isn't 1 to 4, a dimension isn't positive, a row isn't whole blocks, or
            the size is out of bounds.
    """
    if not 1 <= len(shape) <= MAX_RANK:
        raise InputError(
            f"the tensor has {len(shape)} dimensions", where=where, expected=f"1 to {MAX_RANK}"
        )
    if min(shape) < 1:
        raise InputError(
            f"the tensor has a dimension of {min(shape)}", where=where, expected="at least 1"
        )
    elements, block_bytes = BLOCKS[ggml_type]
    if shape[-1] % elements:
        raise InputError(
            f"rows of {shape[-1]} elements aren't whole blocks of {ggml_type.name}",
            where=where,
            expected=f"a multiple of {elements}",
        )
    nbytes = math.prod(shape) // elements * block_bytes
    if max(math.prod(shape), nbytes) > MAX_BYTES:
        raise InputError("the tensor has too many elements", where=where)
    return nbytes


def encode_string(text: str, where: str) -> bytes:
    """Returns a string as the format stores it: length (64 bits), then UTF-8.

    Raises:
        InputError: it has a lone surrogate, or is too long.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            "a string has a lone surrogate", where=where, expected="valid Unicode"
        ) from error
    if len(data) > MAX_STRING_BYTES:
        raise InputError(
            f"a string has {len(data)} bytes", where=where, expected=f"at most {MAX_STRING_BYTES}"
        )
    return struct.pack("<Q", len(data)) + data


def encode_metadata(key: str, value: GgufValue) -> bytes:
    """Returns a key/value as the format stores it: key, type, value.

    Raises:
        InputError: an invalid key, or a value that its type doesn't hold.
    """
    where = f"metadata {key[:80]!r}"
    check_key(key, where)
    body = _encode_value(value, where, depth=0)
    return encode_string(key, where) + struct.pack("<I", value.type) + body


def _encode_value(value: GgufValue, where: str, depth: int) -> bytes:
    if value.type is not ValueType.ARRAY:
        return _encode_scalar(value.type, value.value, where)
    if depth >= MAX_ARRAY_DEPTH:
        raise InputError(
            "arrays are nested too deeply",
            where=where,
            expected=f"at most {MAX_ARRAY_DEPTH} levels",
        )
    if value.item_type is None or not isinstance(value.value, tuple):
        raise InputError("an array has no item type or no items", where=where)
    items = [_encode_item(value.item_type, item, where, depth) for item in value.value]
    return struct.pack("<IQ", value.item_type, len(items)) + b"".join(items)


def _encode_item(item_type: ValueType, item: Scalar | GgufValue, where: str, depth: int) -> bytes:
    if not isinstance(item, GgufValue):
        return _encode_scalar(item_type, item, where)
    if item_type is not ValueType.ARRAY or item.type is not ValueType.ARRAY:
        raise InputError("an array's items aren't of its item type", where=where)
    return _encode_value(item, where, depth + 1)


def _encode_scalar(value_type: ValueType, value: object, where: str) -> bytes:
    if value.__class__ is not _python_type(value_type):
        raise InputError(
            f"a value is {value.__class__.__name__}", where=where, expected=value_type.name
        )
    if isinstance(value, str):
        return encode_string(value, where)
    try:
        return struct.pack("<" + SCALAR_FORMATS[value_type], value)
    except (struct.error, OverflowError) as error:
        raise InputError(
            f"the value {value} is out of range", where=where, expected=value_type.name
        ) from error


def _python_type(value_type: ValueType) -> type[object] | None:
    if value_type is ValueType.STRING:
        return str
    if value_type is ValueType.ARRAY:
        return None
    return {"f": float, "d": float, "?": bool}.get(SCALAR_FORMATS[value_type], int)


def encode_tensor_info(name: str, shape: Sequence[int], ggml_type: GgmlType) -> bytes:
    """Returns a tensor info as the format stores it, without the offset that ends it.

    Args:
        name: at most 63 bytes of UTF-8.
        shape: PyTorch order; the format stores it reversed.
        ggml_type: its GGML type.

    Raises:
        InputError: an invalid name or shape.
    """
    where = f"tensor {name[:80]!r}"
    text = check_name(name.encode("utf-8", "surrogatepass"), where)
    tensor_bytes(shape, ggml_type, where)
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return encode_string(text, where) + dims + struct.pack("<I", ggml_type)

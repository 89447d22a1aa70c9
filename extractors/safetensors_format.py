"""Safetensors headers: one strict reader and the one canonical form that this project writes.

A safetensors file is the header's length (unsigned 64-bit, little endian), the header (a JSON
object that gives each tensor's `dtype`, `shape` and `data_offsets`, plus optionally the strings of
`__metadata__`), then the tensors' bytes: C order, little endian, without gap or overlap.

The canonical form lists the tensors by name, as compact ASCII JSON with the keys `dtype`, `shape`,
`data_offsets` in that order and without `__metadata__`, pads the header with spaces to a multiple
of 8 bytes, and stores the tensors in that same order. Equal tensors then give equal files.

>>> header, entries = canonical_header([SafetensorsSpec("b", "F32", (2,))])
>>> header[8:]
b'{"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import (
    JsonValue,
    as_array,
    as_int,
    as_object,
    as_str,
    json_pointer,
    loads,
    shorten,
)

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
MAX_HEADER_BYTES = 16 << 20
MAX_RANK = 32
MAX_TENSOR_BYTES = (1 << 63) - 1
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})


@dataclass(frozen=True, slots=True)
class SafetensorsSpec:
    """What a header must say about one tensor: its dtype (safetensors name) and C-order shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data.

        Raises:
            InputError: an unknown dtype, a bad shape, or a size out of bounds.
        """
        return _tensor_bytes(self.dtype, self.shape, where=f"tensor {shorten(self.name)!r}")


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor of a file; its bytes are [begin, end) after the file's `data_start`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A checked header. `header_bytes` are the file's first `data_start` bytes, length included.

    `entries` are in the order of their data.
    """

    header_bytes: bytes
    entries: Mapping[str, SafetensorsEntry]
    data_start: int
    metadata: Mapping[str, str]

    @property
    def is_canonical(self) -> bool:
        """Whether the file is, header and data order both, the canonical form of its tensors."""
        specs = (SafetensorsSpec(e.name, e.dtype, e.shape) for e in self.entries.values())
        return canonical_header(specs)[0] == self.header_bytes


def read_header(source: ByteSource) -> SafetensorsFile:
    """Reads and checks the whole header of a safetensors file, and nothing of its tensors.

    Raises:
        InputError: the header breaks a rule; the error names the rule and the tensor.
    """
    where = source.name
    length = _header_length(source)
    data_start = _LENGTH_BYTES + length
    header_bytes = source.pread(0, data_start)
    text = header_bytes[_LENGTH_BYTES:]
    if not text.startswith(b"{"):
        raise InputError("the safetensors header doesn't start with '{'", where=where)
    header = as_object(loads(text, where=where, max_bytes=MAX_HEADER_BYTES), where)
    metadata = _read_metadata(header.pop(_METADATA, {}), where)
    entries = sorted(
        (_read_entry(name, value, where) for name, value in header.items()),
        key=lambda entry: (entry.begin, entry.end, entry.name),
    )
    _check_data(entries, source.size - data_start, where)
    return SafetensorsFile(header_bytes, {e.name: e for e in entries}, data_start, metadata)


def canonical_header(
    specs: Iterable[SafetensorsSpec],
) -> tuple[bytes, tuple[SafetensorsEntry, ...]]:
    """Returns the canonical header, its length field included, and the entries in data order.

    Args:
        specs: the tensors in any order; C-order shapes, safetensors dtype names.

    Raises:
        InputError: a name occurs twice or is `__metadata__` or isn't valid Unicode, a dtype is
            unknown, a shape is out of bounds, or the header would be longer than the reader takes.
    """
    entries: list[SafetensorsEntry] = []
    header: dict[str, dict[str, object]] = {}
    begin = 0
    for spec in sorted(specs, key=lambda spec: spec.name):
        _check_new_name(spec.name, header)
        end = begin + spec.nbytes
        if end > MAX_TENSOR_BYTES:
            raise InputError("the tensors together are too large for a safetensors file")
        entries.append(SafetensorsEntry(spec.name, spec.dtype, spec.shape, begin, end))
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise InputError(
            f"the safetensors header would have {len(text)} bytes",
            expected=f"at most {MAX_HEADER_BYTES}",
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, tuple(entries)


def _check_new_name(name: str, taken: Mapping[str, object]) -> None:
    shown = shorten(name.encode("ascii", "backslashreplace").decode())
    if name in taken:
        raise InputError("two tensors have this name", where=f"tensor {shown!r}")
    if name == _METADATA:
        raise InputError("the name is reserved by the safetensors format", where=f"tensor {name!r}")
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise InputError("the name isn't valid Unicode", where=f"tensor {shown!r}")


def _header_length(source: ByteSource) -> int:
    if source.size < _LENGTH_BYTES:
        raise InputError(
            f"the file has {source.size} bytes, too few for a safetensors header's length",
            where=source.name,
            expected="a safetensors file",
        )
    length = int.from_bytes(source.pread(0, _LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise InputError(
            f"the safetensors header's length says {length} bytes",
            where=source.name,
            expected=f"at most {MAX_HEADER_BYTES}",
        )
    if length > source.size - _LENGTH_BYTES:
        raise InputError(
            f"the safetensors header's length says {length} bytes, but the file ends before that",
            where=source.name,
            expected="a complete file",
            action="Fetch the file again",
        )
    return length


def _read_metadata(value: JsonValue, where: str) -> dict[str, str]:
    location = f"{where}#/{_METADATA}"
    return {key: as_str(text, location) for key, text in as_object(value, location).items()}


def _read_entry(name: str, value: JsonValue, where: str) -> SafetensorsEntry:
    location = f"{where}#{json_pointer((name,))}"
    fields = as_object(value, location)
    if fields.keys() != _ENTRY_KEYS:
        named = ", ".join(sorted(shorten(key) for key in fields)[:8]) or "nothing"
        raise InputError(
            f"the tensor's entry has {named}", where=location, expected="dtype, shape, data_offsets"
        )
    dtype = as_str(fields["dtype"], f"{location}/dtype")
    shape = tuple(as_int(n, f"{location}/shape") for n in as_array(fields["shape"], location))
    offsets = [
        as_int(n, f"{location}/data_offsets") for n in as_array(fields["data_offsets"], location)
    ]
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise InputError(
            "the data offsets are not a range",
            where=location,
            expected="[begin, end], begin <= end",
        )
    begin, end = offsets
    nbytes = _tensor_bytes(dtype, shape, where=location)
    if end - begin != nbytes:
        raise InputError(
            f"the data offsets span {end - begin} bytes",
            where=location,
            expected=f"the {nbytes} bytes of {dtype} {list(shape)}",
        )
    return SafetensorsEntry(name, dtype, shape, begin, end)


def _tensor_bytes(dtype: str, shape: tuple[int, ...], *, where: str) -> int:
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise InputError(
            f"the dtype {shorten(dtype)!r} is unknown", where=where, expected=", ".join(DTYPE_BITS)
        )
    if len(shape) > MAX_RANK:
        raise InputError(
            f"the tensor has {len(shape)} dimensions", where=where, expected=f"at most {MAX_RANK}"
        )
    total = bits
    for size in shape:
        if size < 0:
            raise InputError(f"the dimension {size} is negative", where=where)
        total *= size
        if total > 8 * MAX_TENSOR_BYTES:
            raise InputError("the shape has too many elements", where=where)
    if total % 8:
        raise InputError("the elements don't fill whole bytes", where=where)
    return total // 8


def _check_data(entries: list[SafetensorsEntry], available: int, where: str) -> None:
    position = 0
    for entry in entries:
        if entry.begin != position:
            problem = "leaves a gap" if entry.begin > position else "overlaps another tensor"
            raise InputError(
                f"the tensor's data {problem}: it begins at {entry.begin}",
                where=f"{where}#{json_pointer((entry.name,))}",
                expected=f"{position}, where the data before it ends",
            )
        position = entry.end
    if position > available:
        raise InputError(
            f"the file holds {available} bytes of data, too few",
            where=where,
            expected=f"the {position} bytes that the header describes",
            action="Fetch the file again",
        )
    if position < available:
        raise InputError(
            f"{available - position} bytes follow the last tensor",
            where=where,
            expected="the file to end with its last tensor",
        )

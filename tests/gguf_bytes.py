"""GGUF bytes spelled out by hand, so that each rule can be broken alone; strategies for layouts."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from hypothesis import strategies as st

from sam3d_gguf.convert.gguf_format import (
    BLOCKS,
    SCALAR_FORMATS,
    GgmlType,
    GgufTensorSpec,
    GgufValue,
    ValueType,
)


def text(value: bytes | str) -> bytes:
    """A GGUF string."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key_value(key: bytes | str, value_type: int, body: bytes) -> bytes:
    """A key/value whose value is given as bytes."""
    return text(key) + struct.pack("<I", value_type) + body


def array_of(item_type: int, count: int, body: bytes) -> bytes:
    """The body of an ARRAY value."""
    return struct.pack("<IQ", item_type, count) + body


def info(name: bytes | str, dims: tuple[int, ...] = (2,), code: int = 0, offset: int = 0) -> bytes:
    """A tensor info; dims in GGUF order, the row first."""
    numbers = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + numbers + struct.pack("<IQ", code, offset)


@dataclass
class Parts:
    """A GGUF file in parts; `build` adds nothing but the counts and the padding before the data."""

    metadata: list[bytes] = field(default_factory=list[bytes])
    infos: list[bytes] = field(default_factory=list[bytes])
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None
    metadata_count: int | None = None
    alignment: int = 32
    padding: bytes = b"\0"

    def build(self) -> bytes:
        """Returns the file."""
        tensors = len(self.infos) if self.tensor_count is None else self.tensor_count
        metadata = len(self.metadata) if self.metadata_count is None else self.metadata_count
        header = self.magic + struct.pack("<IQQ", self.version, tensors, metadata)
        header += b"".join(self.metadata) + b"".join(self.infos)
        return header + self.padding * (-len(header) % self.alignment) + self.data


keys = st.from_regex(r"[a-z0-9_]{1,6}(\.[a-z0-9_]{1,6}){0,2}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=15
)


def _scalars(value_type: ValueType) -> st.SearchStrategy[object]:
    if value_type is ValueType.STRING:
        return texts
    code = SCALAR_FORMATS[value_type]
    if code == "?":
        return st.booleans()
    if code in "fd":
        return st.floats(width=32 if code == "f" else 64, allow_nan=False)
    bits = 8 * struct.calcsize(code)
    low = 0 if code.isupper() else -(1 << (bits - 1))
    return st.integers(low, low + (1 << bits) - 1)


scalar_types = st.sampled_from([t for t in ValueType if t is not ValueType.ARRAY])


def _scalar_value(value_type: ValueType) -> st.SearchStrategy[GgufValue]:
    return st.builds(GgufValue, st.just(value_type), _scalars(value_type))


def _flat_array(item_type: ValueType) -> st.SearchStrategy[GgufValue]:
    items = st.lists(_scalars(item_type), max_size=4).map(tuple)
    return st.builds(GgufValue, st.just(ValueType.ARRAY), items, st.just(item_type))


flat_arrays = scalar_types.flatmap(_flat_array)
nested_arrays = st.builds(
    GgufValue,
    st.just(ValueType.ARRAY),
    st.lists(flat_arrays, max_size=3).map(tuple),
    st.just(ValueType.ARRAY),
)
metadata = st.dictionaries(
    keys.filter(lambda key: key != "general.alignment"),
    scalar_types.flatmap(_scalar_value) | flat_arrays,
    max_size=5,
)
metadata_with_nested_arrays = st.dictionaries(
    keys.filter(lambda key: key != "general.alignment"), flat_arrays | nested_arrays, max_size=5
)


def _spec(ggml_type: GgmlType) -> st.SearchStrategy[GgufTensorSpec]:
    blocks = st.lists(st.integers(1, 3), min_size=1, max_size=4)
    shapes = blocks.map(lambda dims: (*dims[:-1], dims[-1] * BLOCKS[ggml_type][0]))
    return st.builds(GgufTensorSpec, names, shapes, st.just(ggml_type))


specs = st.lists(
    st.sampled_from(sorted(GgmlType)).flatmap(_spec), max_size=5, unique_by=lambda spec: spec.name
)

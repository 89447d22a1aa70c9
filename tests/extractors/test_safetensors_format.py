"""The safetensors reader and canonical writer, against the safetensors library and the format."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from sam3d_gguf.extractors.byte_source import ByteSource
from sam3d_gguf.extractors.safetensors_format import (
    MAX_HEADER_BYTES,
    SafetensorsEntry,
    SafetensorsFile,
    SafetensorsSpec,
    canonical_header,
    read_header,
)
from sam3d_gguf.schemas.errors import InputError

NUMPY_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
spec_lists = st.lists(
    st.builds(SafetensorsSpec, names, st.sampled_from(sorted(NUMPY_DTYPES)), shapes),
    max_size=6,
    unique_by=lambda spec: spec.name,
)


def parse(data: bytes) -> SafetensorsFile:
    fd = memory_file(data)
    try:
        return read_header(ByteSource(fd, "test.safetensors"))
    finally:
        os.close(fd)


def memory_file(data: bytes) -> int:
    fd = os.memfd_create("test")
    with os.fdopen(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def with_header(header: bytes | dict[str, object], data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(
    begin: int = 0, end: int = 8, dtype: str = "F32", shape: object = (2,)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def payload(entries: tuple[SafetensorsEntry, ...]) -> bytes:
    size = entries[-1].end if entries else 0
    return bytes(position % 2 for position in range(size))


@given(spec_lists)
def test_the_library_reads_back_what_the_canonical_header_describes(
    specs: list[SafetensorsSpec],
) -> None:
    header, entries = canonical_header(specs)
    data = payload(entries)

    arrays = safetensors.numpy.load(header + data)

    assert arrays.keys() == {spec.name for spec in specs}
    for described in entries:
        array = arrays[described.name]
        assert array.shape == described.shape
        assert array.dtype == NUMPY_DTYPES[described.dtype]
        assert array.tobytes() == data[described.begin : described.end]


@given(spec_lists)
def test_the_reader_returns_what_the_canonical_header_describes(
    specs: list[SafetensorsSpec],
) -> None:
    header, entries = canonical_header(specs)

    file = parse(header + payload(entries))

    assert set(file.entries.values()) == set(entries)
    assert (file.header_bytes, file.data_start) == (header, len(header))
    assert file.metadata == {}
    assert file.is_canonical


@given(spec_lists, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
def test_the_reader_takes_what_the_library_writes(
    specs: list[SafetensorsSpec], metadata: dict[str, str]
) -> None:
    arrays = {s.name: np.zeros(s.shape, NUMPY_DTYPES[s.dtype]) for s in specs}
    data = safetensors.numpy.save(arrays, metadata or None)

    file = parse(data)

    found = {e.name: (NUMPY_DTYPES[e.dtype], e.shape) for e in file.entries.values()}
    assert found == {name: (array.dtype, array.shape) for name, array in arrays.items()}
    assert file.metadata == metadata


def test_the_canonical_form_is_byte_for_byte_the_published_one() -> None:
    header, entries = canonical_header(
        [SafetensorsSpec("w.b", "I64", (2, 1)), SafetensorsSpec("w.a", "F32", (3,))]
    )

    text = (
        b'{"w.a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},'
        b'"w.b":{"dtype":"I64","shape":[2,1],"data_offsets":[12,28]}}'
    )
    assert len(text) == 116
    assert header == (120).to_bytes(8, "little") + text + b"    "
    assert [(e.name, e.begin, e.end) for e in entries] == [("w.a", 0, 12), ("w.b", 12, 28)]


@pytest.mark.parametrize(
    ("header", "data"),
    [
        pytest.param({"b": entry(0, 8), "a": entry(8, 16)}, bytes(16), id="data order"),
        pytest.param({"a": entry(), "__metadata__": {}}, bytes(8), id="metadata"),
        pytest.param(json.dumps({"a": entry()}).encode(), bytes(8), id="spaces"),
    ],
)
def test_a_file_in_another_form_is_read_but_is_not_canonical(
    header: bytes | dict[str, object], data: bytes
) -> None:
    file = parse(with_header(header, data))

    assert not file.is_canonical


def test_entries_come_in_the_order_of_their_data() -> None:
    file = parse(with_header({"a": entry(8, 16), "b": entry(0, 8)}, bytes(16)))

    assert list(file.entries) == ["b", "a"]


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "too few for a safetensors header's length"),
        (bytes(7), "too few for a safetensors header's length"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + bytes(64), "expected at most"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "expected at most"),
        ((3).to_bytes(8, "little") + b"{}", "ends before that"),
        (with_header(b""), "doesn't start with '{'"),
        (with_header(b" {}"), "doesn't start with '{'"),
        (with_header(b"[]"), "doesn't start with '{'"),
        (with_header(b"{"), "not JSON"),
        (with_header(b"{}{}"), "not JSON"),
        (with_header(b'{"\xff": 1}'), "UTF-8"),
        (with_header(b'{"a": 1e999}'), "overflows"),
        (with_header(b'{"\\ud800": {}}'), "lone surrogate"),
        (with_header(b'{"x":' + b'{"x":' * 100 + b"1" + b"}" * 101), "too deep"),
        (with_header(b'{"a": 0, "a": 0}'), "occurs twice"),
        (
            with_header(b'{"a":{"dtype":"F32","dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
            "occurs twice",
        ),
        (with_header({"a": 1}), "expected an object"),
        (with_header({"a": {}}), "expected dtype, shape, data_offsets"),
        (with_header({"a": {**entry(), "stride": 1}}, bytes(8)), "expected dtype, shape"),
        (with_header({"a": entry(dtype="F33")}, bytes(8)), "dtype 'F33' is unknown"),
        (with_header({"a": entry(dtype="f32")}, bytes(8)), "dtype 'f32' is unknown"),
        (with_header({"a": {**entry(), "dtype": 1}}, bytes(8)), "expected a string"),
        (with_header({"a": entry(shape=2)}, bytes(8)), "expected an array"),
        (with_header({"a": entry(shape=[2.0])}, bytes(8)), "expected an integer"),
        (with_header({"a": entry(shape=[True, 2])}, bytes(8)), "expected an integer"),
        (with_header({"a": entry(shape=[-2])}, bytes(8)), "-2 is negative"),
        (with_header({"a": entry(shape=[-1, -2])}, bytes(8)), "-1 is negative"),
        (with_header({"a": entry(shape=[1] * 33)}, bytes(8)), "expected at most 32"),
        (with_header({"a": entry(shape=[1 << 63])}, bytes(8)), "too many elements"),
        (with_header({"a": entry(shape=[1 << 32] * 3)}, bytes(8)), "too many elements"),
        (with_header({"a": entry(shape=[1 << 62, 1 << 62, 0])}, bytes(8)), "too many elements"),
        (with_header({"a": entry(0, 2, "F4", [3])}, bytes(2)), "fill whole bytes"),
        (with_header({"a": {**entry(), "data_offsets": [0]}}, bytes(8)), "not a range"),
        (with_header({"a": {**entry(), "data_offsets": [0, 8, 8]}}, bytes(8)), "not a range"),
        (with_header({"a": {**entry(), "data_offsets": {"0": 8}}}), "expected an array"),
        (with_header({"a": entry(8, 0)}, bytes(8)), "not a range"),
        (with_header({"a": entry(-8, 0)}, bytes(8)), "not a range"),
        (with_header({"a": entry(0, 9)}, bytes(9)), "expected the 8 bytes of F32"),
        (with_header({"a": entry(0, 7)}, bytes(7)), "expected the 8 bytes of F32"),
        (with_header({"a": entry(8, 16)}, bytes(16)), "leaves a gap"),
        (with_header({"a": entry(0, 8), "b": entry(9, 17)}, bytes(17)), "leaves a gap"),
        (with_header({"a": entry(0, 8), "b": entry(7, 15)}, bytes(15)), "overlaps"),
        (with_header({"a": entry(), "b": entry()}, bytes(8)), "overlaps"),
        (with_header({"a": entry(), "b": entry(4, 4, shape=[0])}, bytes(8)), "overlaps"),
        (with_header({"a": entry()}, bytes(7)), "too few"),
        (with_header({"a": entry()}, bytes(9)), "1 bytes follow the last tensor"),
        (with_header({}, bytes(1)), "1 bytes follow the last tensor"),
        (with_header({"__metadata__": []}), "expected an object"),
        (with_header({"__metadata__": {"a": 1}}), "expected a string"),
    ],
)
def test_a_broken_rule_is_named(data: bytes, rule: str) -> None:
    with pytest.raises(InputError, match=rule.replace("{", r"\{")):
        parse(data)


def test_a_fault_is_located_in_file_and_tensor() -> None:
    with pytest.raises(InputError) as caught:
        parse(with_header({"a/b": entry(0, 9)}, bytes(9)))

    assert caught.value.where == "test.safetensors#/a~1b"


@pytest.mark.parametrize(
    ("specs", "rule"),
    [
        ([SafetensorsSpec("a", "F32", ())] * 2, "two tensors"),
        ([SafetensorsSpec("__metadata__", "F32", ())], "reserved"),
        ([SafetensorsSpec("\ud800", "F32", ())], "valid Unicode"),
        ([SafetensorsSpec("a", "Q4", ())], "unknown"),
        ([SafetensorsSpec("a", "F32", (-1,))], "negative"),
        ([SafetensorsSpec("a", "U8", ((1 << 62),)), SafetensorsSpec("b", "U8", (1 << 62,))], "too"),
        ([SafetensorsSpec("a" * MAX_HEADER_BYTES, "U8", (1,))], "expected at most"),
    ],
)
def test_the_writer_refuses_what_the_reader_would(specs: list[SafetensorsSpec], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        canonical_header(specs)


@given(st.data())
def test_a_changed_header_byte_is_refused_or_changes_what_is_read(data: st.DataObject) -> None:
    specs = data.draw(spec_lists.filter(bool))
    header, entries = canonical_header(specs)
    position = data.draw(st.integers(0, len(header) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != header[position]))
    changed = header[:position] + bytes([byte]) + header[position + 1 :]

    try:
        file = parse(changed + payload(entries))
    except InputError:
        return

    assert not file.is_canonical or set(file.entries.values()) != set(entries)


def test_a_header_of_the_largest_size_is_read() -> None:
    text = json.dumps({"a": entry()}).encode()
    data = with_header(text + b" " * (MAX_HEADER_BYTES - len(text)), bytes(8))

    assert parse(data).entries.keys() == {"a"}

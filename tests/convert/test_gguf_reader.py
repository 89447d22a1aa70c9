"""The GGUF reader: every rule of the format, each broken alone."""

from __future__ import annotations

import struct

import pytest
from gguf_bytes import Parts, array_of, info, key_value, text
from hypothesis import given
from hypothesis import strategies as st
from memory_source import memory_source

from sam3d_gguf.convert.gguf_format import (
    MAX_ARRAY_DEPTH,
    MAX_ARRAYS,
    MAX_HEADER_BYTES,
    MAX_ITEMS,
    GgmlType,
    GgufTensor,
    GgufValue,
    ValueType,
)
from sam3d_gguf.convert.gguf_reader import GgufFile, read_gguf
from sam3d_gguf.schemas.errors import InputError


def parse(data: bytes) -> GgufFile:
    with memory_source(data, "test.gguf") as source:
        return read_gguf(source)


def test_a_file_spelled_out_by_the_specification() -> None:
    file = parse(
        Parts(
            metadata=[
                key_value("general.architecture", 8, text("sam3d.body")),
                key_value("general.alignment", 4, struct.pack("<I", 16)),
                key_value("a.u8", 0, b"\xff"),
                key_value("a.i8", 1, b"\xff"),
                key_value("a.u16", 2, b"\x01\x02"),
                key_value("a.i16", 3, b"\xfe\xff"),
                key_value("a.i32", 5, b"\xfd\xff\xff\xff"),
                key_value("a.f32", 6, b"\0\0\x20\x40"),
                key_value("a.bool", 7, b"\1"),
                key_value("a.u64", 10, b"\xff" * 8),
                key_value("a.i64", 11, b"\xff" * 8),
                key_value("a.f64", 12, struct.pack("<d", 1e-5)),
                key_value("a.list", 9, array_of(8, 2, text("a") + text("é"))),
                key_value("a.flags", 9, array_of(7, 2, b"\0\1")),
                key_value("a.nested", 9, array_of(9, 1, array_of(4, 2, bytes(8)))),
            ],
            infos=[info("b", (3, 2), 0, 0), info("a", (32,), 8, 32)],
            data=bytes(24) + bytes(8) + bytes(34) + bytes(14),
            alignment=16,
        ).build()
    )

    assert (file.version, file.alignment) == (3, 16)
    assert {key: value.value for key, value in file.metadata.items()} == {
        "general.architecture": "sam3d.body",
        "general.alignment": 16,
        "a.u8": 255,
        "a.i8": -1,
        "a.u16": 513,
        "a.i16": -2,
        "a.i32": -3,
        "a.f32": 2.5,
        "a.bool": True,
        "a.u64": (1 << 64) - 1,
        "a.i64": -1,
        "a.f64": 1e-5,
        "a.list": ("a", "é"),
        "a.flags": (False, True),
        "a.nested": (GgufValue(ValueType.ARRAY, (0, 0), ValueType.UINT32),),
    }
    assert [value.type for value in file.metadata.values()] == [
        8,
        4,
        0,
        1,
        2,
        3,
        5,
        6,
        7,
        10,
        11,
        12,
        9,
        9,
        9,
    ]
    start = file.data_offset
    assert start % 16 == 0
    assert list(file.tensors.values()) == [
        GgufTensor("b", (2, 3), GgmlType.F32, start, 24),
        GgufTensor("a", (32,), GgmlType.Q8_0, start + 32, 34),
    ]
    assert file.size == start + 80


def test_a_file_without_tensors() -> None:
    file = parse(Parts(metadata=[key_value("a", 0, b"\0")]).build())

    assert (file.tensors, file.data_offset, file.alignment) == ({}, 64, 32)


def header(metadata: bytes) -> bytes:
    return Parts(metadata=[metadata]).build()


def one_tensor(tensor: bytes, data: bytes = bytes(32)) -> bytes:
    return Parts(infos=[tensor], data=data).build()


def nested(depth: int) -> bytes:
    body = array_of(0, 1, b"\0")
    for _ in range(depth - 1):
        body = array_of(9, 1, body)
    return key_value("a", 9, body)


def alignment(value: int, value_type: int = 4) -> bytes:
    width = {4: 4, 5: 4, 10: 8}[value_type]
    return header(key_value("general.alignment", value_type, value.to_bytes(width, "little")))


HALF = [info("a", offset=0), info("b", offset=32)]

BROKEN = [
    (b"", "ends at byte 0, inside the header"),
    (b"GGU", "ends at byte 3"),
    (Parts(magic=b"GGML").build(), "starts with b'GGML'; expected b'GGUF'"),
    (Parts(magic=b"FUGG").build(), "starts with b'FUGG'"),
    (Parts(version=2).build(), "version is 2; expected 3"),
    (Parts(version=4).build(), "version is 4"),
    (Parts(version=0).build(), "version is 0"),
    (Parts(version=3 << 24).build(), r"version is 50331648 \(big endian\)"),
    (Parts().build()[:23], "ends at byte 23"),
    (Parts(tensor_count=1 << 63).build(), "number of tensors is 9223372036854775808"),
    (Parts(tensor_count=(1 << 16) + 1).build(), "number of tensors is 65537; expected at most"),
    (Parts(tensor_count=1).build()[:24], "ends at byte 24"),
    (Parts(metadata_count=(1 << 16) + 1).build(), "number of key/values is 65537"),
    (Parts(metadata_count=1).build()[:24], "ends at byte 24"),
    # Keys
    (header(key_value("", 0, b"\0")), "isn't a valid one"),
    (header(key_value("A", 0, b"\0")), "isn't a valid one"),
    (header(key_value("a..b", 0, b"\0")), "isn't a valid one"),
    (header(key_value(".a", 0, b"\0")), "isn't a valid one"),
    (header(key_value("a.", 0, b"\0")), "isn't a valid one"),
    (header(key_value("a b", 0, b"\0")), "isn't a valid one"),
    (header(key_value("a-b", 0, b"\0")), "isn't a valid one"),
    (header(key_value("a\n", 0, b"\0")), "isn't a valid one"),
    (header(key_value("a\0", 0, b"\0")), "isn't a valid one"),
    (header(key_value("é", 0, b"\0")), "isn't a valid one"),
    (header(key_value(b"\xff", 0, b"\0")), "isn't UTF-8"),
    (
        header(key_value("a" * 65536, 0, b"\0")),
        "length of the key is 65536; expected at most 65535",
    ),
    (header(struct.pack("<Q", (1 << 64) - 1)), "length of the key is 18446744073709551615"),
    (Parts(metadata=[key_value("a", 0, b"\0")] * 2).build(), "key 'a' occurs twice"),
    # Values
    (header(key_value("a", 13, b"\0")), "value type 13 is unknown"),
    (header(key_value("a", 0xFFFFFFFF, b"\0")), "value type 4294967295 is unknown"),
    (header(key_value("a", 7, b"\2")), "BOOL is neither 0 nor 1"),
    (header(key_value("a", 7, b"\xff")), "BOOL is neither 0 nor 1"),
    (header(key_value("a", 9, array_of(7, 3, b"\0\1\2"))), "BOOL is neither 0 nor 1"),
    (header(key_value("a", 8, text(b"\xff"))), "byte 0 of a string isn't UTF-8"),
    (header(key_value("a", 8, text(b"\xed\xa0\x80"))), "isn't UTF-8"),
    (header(key_value("a", 8, text(b"\xc0\x80"))), "isn't UTF-8"),
    (header(key_value("a", 9, array_of(8, 1, text(b"\xff")))), "isn't UTF-8"),
    (
        header(key_value("a", 8, struct.pack("<Q", (16 << 20) + 1))),
        "length of a string is 16777217",
    ),
    (header(key_value("a", 8, struct.pack("<Q", 1000))), "inside the header"),
    (header(key_value("a", 9, array_of(13, 0, b""))), "value type 13 is unknown"),
    (
        header(key_value("a", 9, array_of(0, MAX_ITEMS + 1, b""))),
        "number of array items is 2097153",
    ),
    (header(key_value("a", 9, array_of(0, 1 << 63, b""))), "number of array items is"),
    (header(key_value("a", 9, array_of(10, 1000, b""))), "expected 8000 bytes more"),
    (header(key_value("a", 9, array_of(8, 1000, b""))), "expected 8000 bytes more"),
    (
        header(key_value("a", 9, array_of(9, MAX_ARRAYS + 1, b""))),
        "number of arrays in it is 32769",
    ),
    (header(nested(MAX_ARRAY_DEPTH + 1)), "nested too deeply; expected at most 4"),
    # Alignment
    (alignment(0), "general.alignment is 0; expected a power of two from 8 to 4096"),
    (alignment(4), "general.alignment is 4;"),
    (alignment(24), "general.alignment is 24;"),
    (alignment(8192), "general.alignment is 8192;"),
    (alignment(32, 10), "general.alignment is of type UINT64; expected UINT32"),
    (alignment(32, 5), "general.alignment is of type INT32"),
    # Tensor infos
    (one_tensor(info("")), "tensor name has 0 bytes; expected 1 to 63"),
    (one_tensor(info("a" * 64)), "length of the name is 64; expected at most 63"),
    (one_tensor(info(b"\xff")), "isn't UTF-8"),
    (one_tensor(info("a\0b")), "NUL character"),
    (
        Parts(infos=[info("a"), info("a", offset=32)], data=bytes(64)).build(),
        "two tensors are named 'a'",
    ),
    (one_tensor(info("a", ())), "has 0 dimensions; expected 1 to 4"),
    (one_tensor(info("a", (1,) * 5)), "has 5 dimensions"),
    (one_tensor(text("a") + struct.pack("<I", 0xFFFFFFFF)), "has 4294967295 dimensions"),
    (one_tensor(info("a", (0,))), "dimension of 0; expected at least 1"),
    (one_tensor(info("a", (2, 0))), "dimension of 0"),
    (one_tensor(info("a", (1 << 63,))), "too many elements"),
    (one_tensor(info("a", ((1 << 64) - 1,))), "too many elements"),
    (one_tensor(info("a", (1 << 32, 1 << 32, 1 << 32, 1 << 32))), "too many elements"),
    (one_tensor(info("a", (1 << 61,), 28)), "too many elements"),
    (one_tensor(info("a", (1 << 62, 2), 2)), "too many elements"),
    (one_tensor(info("a", (2,), 4)), "tensor type 4 is unknown"),
    (one_tensor(info("a", (2,), 31)), "tensor type 31 is unknown"),
    (one_tensor(info("a", (2,), 0xFFFFFFFF)), "tensor type 4294967295 is unknown"),
    (one_tensor(info("a", (31,), 2)), "rows of 31 elements aren't whole blocks of Q4_0"),
    (one_tensor(info("a", (16, 2), 2)), "rows of 16 elements aren't whole blocks"),
    # Data
    (one_tensor(info("a", offset=1)), "offset is 1; expected 0, the next multiple of 32"),
    (one_tensor(info("a", offset=32), bytes(64)), "offset is 32; expected 0"),
    (Parts(infos=[info("a"), info("b")], data=bytes(64)).build(), "'b': the tensor's offset is 0"),
    (
        Parts(infos=[info("a"), info("b", offset=8)], data=bytes(64)).build(),
        "offset is 8; expected 32",
    ),
    (Parts(infos=[info("a"), info("b", offset=64)], data=bytes(96)).build(), "offset is 64"),
    (Parts(infos=HALF[::-1], data=bytes(64)).build(), "'b': the tensor's offset is 32; expected 0"),
    (one_tensor(info("a", offset=(1 << 64) - 32)), "offset is 18446744073709551584"),
    (one_tensor(info("a"), bytes(31)), "the file has 95 bytes; expected 96, up to"),
    (one_tensor(info("a"), bytes(8)), "the file has 72 bytes; expected 96"),
    (one_tensor(info("a"), bytes(33)), "the file has 97 bytes; expected 96"),
    (one_tensor(info("a"), bytes(64)), "the file has 128 bytes; expected 96"),
    (Parts(metadata=[key_value("a", 0, b"\0")]).build()[:-1], "the file has 63 bytes; expected 64"),
    (one_tensor(info("a"), bytes(8) + b"\1" + bytes(23)), "padding at byte 72 isn't zero"),
    (one_tensor(info("a"), bytes(31) + b"\1"), "padding at byte 72 isn't zero"),
    (Parts(infos=HALF, data=bytes(63) + b"\1").build(), "padding at byte 136 isn't zero"),
    (
        Parts(infos=[info("a")], data=bytes(32), padding=b"\1").build(),
        "padding at byte 57 isn't zero",
    ),
]


@pytest.mark.parametrize(("data", "rule"), BROKEN, ids=[rule for _, rule in BROKEN])
def test_a_broken_rule_is_named(data: bytes, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        parse(data)


def test_the_tensors_together_are_bounded() -> None:
    size = 1 << 62
    infos = [info("a", (size,), 24), info("b", (size,), 24, size), info("c", (64,), 24, 2 * size)]

    with pytest.raises(InputError, match="the tensors together are too large"):
        parse(Parts(infos=infos).build())


def test_array_items_of_all_keys_together_are_bounded() -> None:
    half = array_of(0, MAX_ITEMS // 2 + 1, bytes(MAX_ITEMS // 2 + 1))

    with pytest.raises(InputError, match="number of array items is 1048577; expected at most"):
        parse(Parts(metadata=[key_value("a", 9, half), key_value("b", 9, half)]).build())


def test_arrays_inside_arrays_of_all_keys_together_are_bounded() -> None:
    count = MAX_ARRAYS // 2 + 1
    half = array_of(9, count, array_of(0, 0, b"") * count)

    with pytest.raises(InputError, match="number of arrays in it is 16385; expected at most 16383"):
        parse(Parts(metadata=[key_value("a", 9, half), key_value("b", 9, half)]).build())


def test_the_header_is_bounded() -> None:
    string = text(b"a" * (16 << 20))
    count = MAX_HEADER_BYTES // len(string) + 1
    parts = Parts(metadata=[key_value(f"k{index}", 8, string) for index in range(count)])

    with pytest.raises(InputError, match="the header goes on; expected at most 67108864 bytes"):
        parse(parts.build())


def test_a_fault_is_located_in_file_and_key() -> None:
    with pytest.raises(InputError) as caught:
        parse(header(key_value("sam3d.flag", 7, b"\2")))

    assert caught.value.where == "test.gguf: sam3d.flag"


@given(st.binary(max_size=200))
def test_any_bytes_after_the_magic_are_refused_or_read(data: bytes) -> None:
    try:
        parse(b"GGUF\3\0\0\0" + data)
    except InputError:
        return


@pytest.mark.parametrize("depth", range(1, MAX_ARRAY_DEPTH + 1))
def test_arrays_nest_as_deep_as_is_accepted(depth: int) -> None:
    found = parse(header(nested(depth))).metadata["a"]

    expected = GgufValue(ValueType.ARRAY, (0,), ValueType.UINT8)
    for _ in range(depth - 1):
        expected = GgufValue(ValueType.ARRAY, (expected,), ValueType.ARRAY)
    assert found == expected

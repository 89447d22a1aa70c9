"""The pickle machine: equal to Python's pickle on plain data, a refusal or a record on all else."""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections import OrderedDict
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam3d_gguf.extractors.limits import Limits
from sam3d_gguf.extractors.pickle_machine import (
    Dict,
    Global,
    Object,
    Op,
    Persistent,
    Set,
    Value,
    read_pickle,
)
from sam3d_gguf.schemas.errors import InputError

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
MAX_INTEGER = 2 ** (Limits().integer_bytes * 8 - 1) - 1


def value_of(data: bytes) -> Value:
    return read_pickle(data).value


def plain(value: Value) -> Any:
    """The Python value of a pickle of plain data, what little of it needs a call included."""
    match value:
        case Dict(pairs=pairs):
            return {plain(key): plain(item) for key, item in pairs}
        case Set(items=items):
            return {plain(item) for item in items}
        case list():
            return [plain(item) for item in value]
        case tuple():
            return tuple(plain(item) for item in value)
        case Object(function=Global(name="encode"), arguments=(str(text), "latin1")):
            return text.encode("latin1")
        case Object(function=Global(name="bytes"), arguments=()):
            return b""
        case Object(function=Global(name="set"), arguments=(list(items),)):
            return {plain(item) for item in items}
        case Object() | Global() | Persistent():
            raise AssertionError(value)
        case _:
            return value


def same(left: Any, right: Any) -> bool:
    """Equality that tells 1 from True and 1.0, and takes NaN for NaN."""
    return repr(left) == repr(right)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-MAX_INTEGER, MAX_INTEGER)
    | st.floats()
    | st.text()
    | st.binary()
)
keys = st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | st.text() | st.binary()
data = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(st.integers(), max_size=1)
    ),
    max_leaves=30,
)


@given(data, st.sampled_from(PROTOCOLS))
def test_plain_data_is_read_as_pickle_reads_it(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)

    found = read_pickle(data)

    assert same(plain(found.value), pickle.loads(data))
    assert found.end == len(data)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_values_larger_than_a_frame_are_read(protocol: int) -> None:
    value = ["x" * 100_000, b"y" * 200_000, list(range(70_000)), "z"]

    assert plain(value_of(pickle.dumps(value, protocol))) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_and_cyclic_values_stay_one_object(protocol: int) -> None:
    inner: list[Any] = []
    inner.append(inner)

    found = cast("list[Any]", value_of(pickle.dumps([inner, inner], protocol)))

    assert found[0] is found[1] is found[0][0]


def test_every_opcode_of_pickletools_is_known() -> None:
    assert {op.name: op.value for op in Op} == {op.name: ord(op.code) for op in pickletools.opcodes}


def test_bytearrays_are_bytes() -> None:
    assert value_of(pickle.dumps(bytearray(b"ab"), 5)) == b"ab"


def test_frozensets_are_sets() -> None:
    found = value_of(pickle.dumps(frozenset({"a"}), 4))

    assert isinstance(found, Set)
    assert found.items == ["a"]


def test_calls_are_recorded_not_made() -> None:
    found = read_pickle(pickle.dumps(OrderedDict(a=1), 2))

    assert isinstance(found.value, Object)
    assert found.value.function == Global("collections", "OrderedDict")
    assert found.value.arguments == ()
    assert found.value.pairs == [("a", 1)]
    assert found.globals == (Global("collections", "OrderedDict"),)


OS_SYSTEM = Object(Global("os", "system"), ("id",))
CALLS = {
    "REDUCE": b"cos\nsystem\n(X\2\0\0\0idtR.",
    "REDUCE of STACK_GLOBAL": b"\x8c\2os\x8c\6system\x93\x8c\2id\x85R.",
    "REDUCE of memoized names": b"\x8c\2os\x940\x8c\6system\x940h\0h\1\x93\x8c\2id\x85R.",
    "INST": b"(X\2\0\0\0idios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nX\2\0\0\0ido.",
    "NEWOBJ": b"\x80\2cos\nsystem\nX\2\0\0\0id\x85\x81.",
}


@pytest.mark.parametrize("data", CALLS.values(), ids=CALLS.keys())
def test_every_way_to_call_gives_the_same_record(data: bytes) -> None:
    found = value_of(data)

    assert isinstance(found, Object)
    assert (found.function, found.arguments) == (OS_SYSTEM.function, OS_SYSTEM.arguments)


def test_keyword_arguments_are_the_last_argument() -> None:
    found = value_of(b"cm\nC\n)}\x92.")

    assert isinstance(found, Object)
    assert isinstance(found.arguments[0], Dict)


def test_what_would_change_an_object_is_recorded() -> None:
    found = value_of(b"cm\nC\n)\x81K\1aK\2K\3s(K\4K\5u(K\6e(K\7\x90}b.")

    assert isinstance(found, Object)
    assert found.items == [1, 6, 7]
    assert found.pairs == [(2, 3), (4, 5)]
    assert [type(state) for state in found.states] == [Dict]


def test_persistent_ids_are_recorded() -> None:
    found = read_pickle(b"Pkey\n0(X\1\0\0\0aK\1tQ.")

    assert [one.id for one in found.persistent] == ["key", ("a", 1)]
    assert found.value is found.persistent[1]


def test_marks_and_pops_move_the_stack() -> None:
    assert value_of(b"K\1(K\2K\3(1K\x040(0K\x051.") == 1


def test_python_2_strings_are_text_where_they_can_be() -> None:
    assert value_of(b"U\2\xc3\xa9.") == "\xe9"
    assert value_of(b"U\1\xe9.") == b"\xe9"
    assert value_of(b"T\2\0\0\0\xc3\xa9.") == "\xe9"
    assert value_of(rb"S'a\x41\n\\\''" + b"\n.") == "aA\n\\'"


def test_numbers_written_as_text_are_read() -> None:
    assert same(
        value_of(b"(I01\nI00\nI-5\nL12L\nL7\nF1e-05\nFinf\nt."),
        (True, False, -5, 12, 7, 1e-5, float("inf")),
    )


def test_what_follows_the_end_is_left_alone() -> None:
    data = b"K\1.cos\nsystem\n."

    first = read_pickle(data)

    assert (first.value, first.end) == (1, 3)
    assert read_pickle(data, first.end).globals == (Global("os", "system"),)


REFUSED = {
    "is empty": (b"", "cut short"),
    "ends without STOP": (b"K\1", "cut short"),
    "ends inside an argument": (b"K", "cut short"),
    "ends inside a text": (b"X\xff\0\0\0ab", "cut short"),
    "unknown opcode": (b"\xff.", "0xff is no opcode"),
    "newline as opcode": (b"\n.", "0x0a is no opcode"),
    "STOP on an empty stack": (b".", "takes more values"),
    "STOP below a mark": (b"K\1(.", "takes more values"),
    "values left on the stack": (b"K\1K\2.", "leaves values"),
    "mark left on the stack": (b"(K\1K\2.", "leaves values"),
    "mark left on an empty stack": (b"(K\1.", "leaves values"),
    "tuple without mark": (b"K\1t.", "there is none"),
    "tuple of too few": (b"K\1\x86.", "takes more values"),
    "pop of nothing": (b"0.", "takes more values"),
    "pop through a mark": (b"K\1(K\2000.", "takes more values"),
    "append to a number": (b"K\1K\2a.", "not a list"),
    "append to a tuple": (b")K\2a.", "not a list"),
    "add to a list": (b"](K\1\x90.", "not a set"),
    "set an entry of a list": (b"]K\1K\2s.", "not a dictionary"),
    "entries without a value": (b"}(K\1u.", "without a value"),
    "build of a global": (b"cos\nsystem\n}b.", "not an object"),
    "build of a persistent id": (b"Pa\n}b.", "not an object"),
    "reduce without a tuple": (b"cos\nsystem\n]R.", "not a tuple"),
    "object without a class": (b"(o.", "without a class"),
    "global named by numbers": (b"K\1K\2\x93.", "not text"),
    "global without end": (b"cos\nsystem", "cut short"),
    "global that is not UTF-8": (b"c\xff\nsystem\n.", "not UTF-8"),
    "memo entry that is missing": (b"h\1.", "no entry 1"),
    "memo entry beyond the limit": (b"K\1r\xff\xff\xff\xff.", "beyond"),
    "memo entry before 0": (b"K\1p-1\n.", "beyond"),
    "protocol 6": (b"\x80\6N.", "newer than 5"),
    "extension registry": (b"\x82\1.", "extension registry"),
    "extension registry, two bytes": (b"\x83\1\1.", "extension registry"),
    "extension registry, four bytes": (b"\x84\1\1\1\1.", "extension registry"),
    "out-of-band buffer": (b"\x97.", "out-of-band"),
    "read-only buffer": (b"N\x98.", "out-of-band"),
    "text that is not UTF-8": (b"X\1\0\0\0\xff.", "not UTF-8"),
    "lone surrogate": (b"X\3\0\0\0\xed\xa0\x80.", "not UTF-8"),
    "lone surrogate, escaped": (b"V\\ud800\n.", "not Unicode"),
    "raw text cut short": (b"V\\u12\n.", "not Unicode"),
    "text of negative size": (b"T\xff\xff\xff\xff.", "of -1 bytes"),
    "text of 2**64-1 bytes": (b"\x8d" + b"\xff" * 8 + b".", "bytes, where at most"),
    "bytes of 4 GiB": (b"B\xff\xff\xff\xff.", "bytes, where at most"),
    "bytes of 2**64-1": (b"\x8e" + b"\xff" * 8 + b".", "bytes, where at most"),
    "bytearray of 2**63": (b"\x96" + b"\0" * 7 + b"\x80.", "bytes, where at most"),
    "integer of 2 GiB": (b"\x8b\xff\xff\xff\x7f.", "bytes, where at most"),
    "integer of negative size": (b"\x8b\xff\xff\xff\xff.", "bytes, where at most"),
    "integer of a million digits": (b"I" + b"9" * 10**6 + b"\n.", "of more than 128 bytes"),
    "long of a million digits": (b"L" + b"9" * 10**6 + b"L\n.", "of more than 128 bytes"),
    "integer in hexadecimal": (b"I0x10\n.", "decimal integer"),
    "integer with underscores": (b"I1_0\n.", "decimal integer"),
    "integer of other digits": ("I\u0663\n.".encode(), "decimal integer"),
    "float with underscores": (b"F1_0.0\n.", "decimal number"),
    "float of a million digits": (b"F" + b"9" * 10**6 + b"\n.", "decimal number"),
    "float without digits": (b"F\n.", "decimal number"),
    "string without quotes": (b"Sab\n.", "without its quotes"),
    "string between letters": (b"Saba\n.", "without its quotes"),
    "string with one quote": (b"S'\n.", "without its quotes"),
    "string with other quotes": (b"S'a\"\n.", "without its quotes"),
    "string with a bad escape": (b"S'\\q'\n.", "unknown escape"),
    "string with a cut escape": (b"S'\\x4'\n.", "unknown escape"),
    "line of 2 MiB": (b"V" + b"a" * (2 << 20) + b"\n.", "a line without end"),
    "frame past the end": (b"\x95\xff\0\0\0\0\0\0\0N.", "past the end"),
    "frame of 2**64-1 bytes": (b"\x95" + b"\xff" * 8 + b"N.", "past the end"),
    "frame inside a frame": (b"\x95\x0c" + b"\0" * 7 + b"\x95\1" + b"\0" * 7 + b"N..", "inside"),
    "opcode across a frame's end": (b"\x95\1" + b"\0" * 7 + b"K\1.", "crosses"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_malformed_pickles_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read_pickle(data)


@pytest.mark.parametrize(
    ("limits", "data"),
    [
        (Limits(opcodes=100), b"N0" * 50 + b"N."),
        (Limits(calls=100), b"N" + b"cos\nsystem\n)R0" * 101 + b"."),
        (Limits(stack=50), b"(" + b"N" * 51 + b"t."),
        (Limits(globals=2), b"cm\na\n0cm\nb\n0cm\nc\n."),
        (Limits(memo=10), b"N" + b"\x94" * 11 + b"."),
        (Limits(pickle_bytes=10), pickle.dumps("eleven bytes")),
        (Limits(text_bytes=4), pickle.dumps("abcde")),
        (Limits(integer_bytes=2), pickle.dumps(2**31)),
        (Limits(integer_bytes=2), b"I32768\n."),
    ],
)
def test_each_limit_holds(limits: Limits, data: bytes) -> None:
    read_pickle(data)
    with pytest.raises(InputError, match="malformed pickle"):
        read_pickle(data, limits=limits)


def test_an_error_says_where() -> None:
    with pytest.raises(
        InputError, match=r"data\.pkl: malformed pickle at byte 5: memo has no entry"
    ):
        read_pickle(b"\x80\2K\1\x30h\7.", where="data.pkl")


def test_a_deep_value_is_read_and_dropped() -> None:
    deep = b")" + b"\x85" * 500_000 + b"."

    assert isinstance(read_pickle(deep).value, tuple)


def test_colliding_keys_are_never_hashed() -> None:
    modulus = 2**61 - 1
    entries = b"".join(
        b"\x8a\x09" + struct.pack("<Q", (index * modulus) & (2**64 - 1)) + b"\0N"
        for index in range(100_000)
    )

    found = read_pickle(b"}(" + entries + b"u.").value

    assert isinstance(found, Dict)
    assert len(found.pairs) == 100_000


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read_pickle(data)
    except InputError:
        return

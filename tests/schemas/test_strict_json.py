"""The strict loader: what it accepts equals the standard parser; every refusal has its example."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam3d_gguf.schemas.errors import InputError
from sam3d_gguf.schemas.strict_json import (
    JsonValue,
    as_array,
    as_int,
    as_object,
    as_str,
    dumps,
    json_pointer,
    load_file,
    loads,
)

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
_VALUES: st.SearchStrategy[JsonValue] = st.recursive(
    _SCALARS,
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


@given(_VALUES)
def test_what_the_standard_library_writes_is_read_back(value: JsonValue) -> None:
    for ascii_only in (True, False):
        data = json.dumps(value, ensure_ascii=ascii_only).encode()
        assert loads(data, where="x") == value


@given(_VALUES)
def test_dumps_is_sorted_ascii_and_reads_back(value: JsonValue) -> None:
    data = dumps(value)
    assert data.isascii() and data.endswith(b"\n")
    assert json.loads(data) == value
    assert data == (json.dumps(value, sort_keys=True, indent=1) + "\n").encode()


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\u0dD8e+-.1 tn', max_size=40))
def test_any_input_is_a_value_or_a_refusal(data: bytes | str) -> None:
    raw = data if isinstance(data, bytes) else data.encode()
    try:
        value = loads(raw, where="x")
    except InputError:
        return
    assert value == json.loads(raw)


@pytest.mark.parametrize(
    ("data", "where", "what"),
    [
        (b'{"a": 1, "a": 1}', "x#/a", "occurs twice"),
        (b'{"l": [0, {"k/~": 1, "z": 2, "k/~": 3}]}', "x#/l/1/k~1~0", "occurs twice"),
        (b'{"a": [1, NaN]}', "x#/a/1", "NaN"),
        (b'{"a": -Infinity}', "x#/a", "-Infinity"),
        (b"[1e999]", "x#/0", "overflows"),
        (b"[-1e999]", "x#/0", "overflows"),
        (b"[18446744073709551616]", "x#/0", "64 bits"),
        (b"[-9223372036854775809]", "x#/0", "64 bits"),
        (b"[" + b"9" * 5000 + b"]", "x#/0", "64 bits"),
        (b"[0." + b"1" * 5000 + b"]", "x#/0", "too many characters"),
        (b'{"s": "\\ud800"}', "x#/s", "lone surrogate"),
        (b'["\\udc00\\ud800"]', "x#/0", "lone surrogate"),
        (b'{"\\ud800": 1}', "x", "lone surrogate"),
        (b"\xef\xbb\xbf{}", "x", "byte order mark"),
        (b'"\xed\xa0\x80"', "x", "UTF-8"),
        (b'"\xff"', "x", "UTF-8"),
        (b"{} {}", "x line 1:4", "Extra data"),
        (b"", "x line 1:1", "not JSON"),
        (b"[1,]", "x line 1", "not JSON"),
        (b"[01]", "x line 1", "not JSON"),
        (b'{"a": 1,}', "x line 1", "not JSON"),
        (b"// c\n{}", "x line 1", "not JSON"),
        (b'"\n"', "x line 1", "not JSON"),
        (b"[" * 65 + b"]" * 65, "x", "too deep"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "x", "too deep"),
    ],
)
def test_refusals_name_the_fault_and_its_pointer(data: bytes, where: str, what: str) -> None:
    with pytest.raises(InputError, match=what) as caught:
        loads(data, where="x")
    assert caught.value.where.startswith(where)


def test_limits_accept_what_they_name() -> None:
    assert loads(b"[18446744073709551615, -9223372036854775808]", where="x") == [
        (1 << 64) - 1,
        -(1 << 63),
    ]
    assert loads(b'"\\ud83d\\ude00"', where="x") == "\U0001f600"
    loads(b"[" * 64 + b"]" * 64, where="x")
    assert loads(b'"' + b"[{" * 500 + b'"', where="x") == "[{" * 500
    with pytest.raises(InputError, match="at most 3"):
        loads(b"null", where="x", max_bytes=3)
    with pytest.raises(InputError, match="too many values"):
        loads(b"[" + b"0," * 2_000_001 + b"0]", where="x")


@pytest.mark.parametrize("data", [b'"' + b'\\"' * 500_000, b'"\\' * 500_000, b'"' * 999_999])
def test_unclosed_strings_do_not_make_the_scan_quadratic(data: bytes) -> None:
    with pytest.raises(InputError):
        loads(data, where="x")


def test_a_long_key_is_cut_in_the_message() -> None:
    key = b'"' + b"k" * 100_000 + b'"'
    with pytest.raises(InputError) as caught:
        loads(b"{" + key + b":1," + key + b":2}", where="x")
    assert len(str(caught.value)) < 500


def test_dumps_refuses_what_loads_would() -> None:
    with pytest.raises(InputError, match="not finite"):
        dumps({"a": float("nan")})
    with pytest.raises(InputError, match="surrogate"):
        dumps(["\udcff"])


def test_pointer_escapes() -> None:
    assert json_pointer(["a/b", 3, "m~n", ""]) == "/a~1b/3/m~0n/"


def test_narrowing_helpers_refuse_other_kinds() -> None:
    assert as_object({}) == {} and as_array([]) == [] and as_str("") == "" and as_int(3) == 3
    refused: tuple[tuple[Callable[[JsonValue], object], JsonValue, str], ...] = (
        (as_object, [], "this is an array; expected an object"),
        (as_array, "x", "this is a string; expected an array"),
        (as_str, None, "this is null; expected a string"),
        (as_int, True, "this is a boolean; expected an integer"),
        (as_int, 1.0, "this is a number; expected an integer"),
    )
    for function, value, message in refused:
        with pytest.raises(InputError, match=message):
            function(value)


def test_files(tmp_path: Path) -> None:
    good = tmp_path / "a.json"
    good.write_bytes(b'{"a": 1}')
    assert load_file(good) == {"a": 1}
    with pytest.raises(InputError, match="too long"):
        load_file(good, max_bytes=7)
    link = tmp_path / "link.json"
    link.symlink_to(good)
    with pytest.raises(InputError, match="symbolic link"):
        load_file(link)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(InputError, match="not a regular file"):
        load_file(fifo)
    with pytest.raises(InputError, match="regular file"):
        load_file(tmp_path)
    with pytest.raises(InputError, match="cannot be opened"):
        load_file(tmp_path / "absent.json")

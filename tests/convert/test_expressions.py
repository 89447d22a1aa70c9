"""Expressions agree with Python's arithmetic, and divide exactly or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam3d_gguf.convert.expressions import evaluate, names
from sam3d_gguf.schemas.errors import ContractError


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 100))
def test_arithmetic_is_pythons(a: int, b: int, c: int) -> None:
    dims = {"A": a, "B": b, "C": c}
    assert evaluate("A+B*C-2*(A-1)", dims) == a + b * c - 2 * (a - 1)
    assert evaluate("A*B/B", dims) == a


def test_names() -> None:
    assert names("3*(2*BANDS+1)-J") == {"BANDS", "J"}
    assert names("12") == set()


def test_division_is_exact() -> None:
    assert evaluate("C/2", {"C": 8}) == 4
    with pytest.raises(ContractError, match="9 is not divisible by 2"):
        evaluate("C/2", {"C": 9})
    with pytest.raises(ContractError, match="divisible by 0"):
        evaluate("C/(C-C)", {"C": 9})


@pytest.mark.parametrize(
    "text", ["C**2", "C//2", "-C", "C.real", "f(C)", "1.5", "True", "'x'", "C if C else 1", "C +"]
)
def test_anything_else_is_no_expression(text: str) -> None:
    with pytest.raises(ValueError, match="expression"):
        evaluate(text, {"C": 8})


def test_unknown_name() -> None:
    with pytest.raises(KeyError):
        evaluate("D", {"C": 8})

"""Integer expressions over named dimensions, the language of shapes in the contracts.

>>> evaluate("3*C/2", {"C": 8})
12
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping

from sam3d_gguf.schemas.errors import ContractError

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def evaluate(text: str, dims: Mapping[str, int]) -> int:
    """Returns the value of an expression of + - * / over integers and dimension names.

    Raises:
        ContractError: a division leaves a remainder.
        KeyError: a name is not in dims.
        ValueError: the text is no such expression.
    """
    return _value(_parse(text), dims, text)


def names(text: str) -> frozenset[str]:
    """Returns the dimension names in an expression."""
    return frozenset(node.id for node in ast.walk(_parse(text)) if isinstance(node, ast.Name))


@functools.cache
def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not an expression") from error


def _value(node: ast.expr, dims: Mapping[str, int], text: str) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return dims[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, dims, text), _value(node.right, dims, text)
        if isinstance(node.op, ast.Div):
            return _exact_quotient(left, right, text)
        if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](left, right)
    raise ValueError(f"{text!r} is not an expression of + - * / over integers and names")


def _exact_quotient(left: int, right: int, text: str) -> int:
    if right == 0 or left % right:
        raise ContractError(f"{left} is not divisible by {right}", where=text)
    return left // right

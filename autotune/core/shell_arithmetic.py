"""Arithmetic of whole numbers in a shell script, `$((...))`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

_OPERATIONS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_LARGEST = 2**63


def whole_number(node: ast.expr) -> int:
    result: int | None = None
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        result = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        result = -whole_number(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        operation = _OPERATIONS[type(node.op)]
        result = operation(whole_number(node.left), whole_number(node.right))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        operation = _OPERATIONS.get(type(node.ops[0]), operator.eq)
        result = int(operation(whole_number(node.left), whole_number(node.comparators[0])))
    if result is None or abs(result) >= _LARGEST:
        raise ValueError("no whole-number arithmetic")
    return result

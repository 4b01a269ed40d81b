"""Settings of an experiment that are fields of a dataclass in its own file, as in playgrounds of
Open-Reasoner-Zero. The file is read as a syntax tree: nothing in it runs.

    class PPOExpConfig(BasePPOExpConfig):
        total_num_nodes: int = 8 if not DEBUG_MODE else 1
        ref_num_nodes: int = total_num_nodes
        pretrain: Optional[str] = "Qwen/Qwen2.5-7B"

A value may be a literal, a name of the file, arithmetic, or a choice by `DEBUG_MODE`. Other values
are left out.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.core.space import KnobValue

DEBUG_MODE = "DEBUG_MODE"
MAX_FILE_BYTES = 2**20

_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True, kw_only=True)
class ExperimentSetting:
    """Field of an experiment with its value."""

    value: KnobValue
    line: int


def settings_in(
    file: Path,
    class_name: str,
    *,
    debug: bool,
) -> dict[str, ExperimentSetting]:
    """Return the fields of the class whose values can be read; none without the class."""
    if file.stat().st_size > MAX_FILE_BYTES:
        return {}
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return {}
    values: dict[str, KnobValue] = {DEBUG_MODE: debug}
    settings: dict[str, ExperimentSetting] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            _assign_constant(node, values)
        if not isinstance(node, ast.ClassDef) or node.name != class_name:
            continue
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            name = field.target.id
            values.pop(name, None)
            if field.value is not None and _is_read(field.value, values):
                values[name] = _value(field.value, values)
                settings[name] = ExperimentSetting(value=values[name], line=field.lineno)
    return settings


def _assign_constant(node: ast.Assign, values: dict[str, KnobValue]) -> None:
    """Keep a constant of the file; `DEBUG_MODE` is decided by the launch."""
    for target in node.targets:
        is_constant = isinstance(node.value, ast.Constant) and not isinstance(
            node.value.value, bytes
        )
        if isinstance(target, ast.Name) and target.id != DEBUG_MODE and is_constant:
            values[target.id] = _value(node.value, values)


def _is_read(node: ast.expr, values: Mapping[str, KnobValue]) -> bool:
    try:
        _value(node, values)
    except (LookupError, ZeroDivisionError, OverflowError):
        return False
    return True


def _value(node: ast.expr, values: Mapping[str, KnobValue]) -> KnobValue:
    """Return the value of an expression. Raises LookupError for one that is not read."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as constant):
            return constant
        case ast.Name(id=name):
            return values[name]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, values)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, values)
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return _value(body if _value(test, values) else otherwise, values)
        case ast.BinOp(first, operation, second) if type(operation) in _OPERATIONS:
            function = _OPERATIONS[type(operation)]
            return function(_number(first, values), _number(second, values))
    raise LookupError(ast.dump(node)[:80])


def _number(node: ast.expr, values: Mapping[str, KnobValue]) -> float:
    value = _value(node, values)
    if not isinstance(value, int | float):
        raise LookupError(str(value))
    return value

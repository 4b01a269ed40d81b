"""Calls in the user's source: which one stands at a place, and how often one is made along the longest way through a file."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

MANY = 2
"""What a call inside a loop counts at least."""


def most_calls(file: str, line: int | None, *names: str) -> int:
    """The most calls that one run makes: of these names, or, with a line, of the method that is called there on the same object.

    Branches of one `if` are not added up; a call in a loop counts as several. 1 where the source can't be read.
    """
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return 1
    if line is None:
        wanted = {ast.unparse(call.func) for call in _calls(tree) if _name(call) in names}
    else:
        wanted = {
            ast.unparse(call.func)
            for call in _calls(tree)
            if _name(call) in names and call.lineno <= line <= (call.end_lineno or call.lineno)
        }
    return max(1, *(_most(body, wanted) for body in _bodies(tree)))


def call_at(tree: ast.Module, line: int, span: tuple[int, int, int, int] | None) -> ast.Call | None:
    """The call of exactly this span; without one, the only call that begins in this line, or the one around all others there."""
    calls = list(_calls(tree))
    if span is not None:
        return next(
            (call for call in calls if (call.lineno, call.end_lineno, call.col_offset, call.end_col_offset) == span), None
        )
    there = [call for call in calls if call.lineno <= line <= (call.end_lineno or call.lineno)]
    with_configs = [call for call in there if (_name(call) or "").endswith("Config")]
    return with_configs[0] if len(with_configs) == 1 else None


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _name(call: ast.Call) -> str | None:
    """The last part of what is called: `train` of `trainer.train()`."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else None


def _bodies(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """The module's own statements, and those of every function apart: what a function does is done where it is called."""
    yield tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.body


def _most(body: Iterable[ast.stmt], wanted: set[str]) -> int:
    """Along the longest way; what stands behind a branch that leaves is on another way than the branch."""
    total = 0
    for statement in body:
        if isinstance(statement, ast.If) and _leaves(statement.body):
            return total + _in_expressions([statement.test], wanted) + max(
                _most(statement.body, wanted), _most([*statement.orelse, *_after(body, statement)], wanted)
            )  # fmt: skip
        total += _of(statement, wanted)
    return total


def _after(body: Iterable[ast.stmt], statement: ast.stmt) -> list[ast.stmt]:
    statements = list(body)
    return statements[statements.index(statement) + 1 :]


def _leaves(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _of(statement: ast.stmt, wanted: set[str]) -> int:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return 0
    if isinstance(statement, ast.If):
        branches = max(_most(statement.body, wanted), _most(statement.orelse, wanted))
        return _in_expressions([statement.test], wanted) + branches
    if isinstance(statement, ast.For | ast.While | ast.AsyncFor):
        inside = _most(statement.body, wanted)
        return inside * MANY + _most(statement.orelse, wanted)
    if isinstance(statement, ast.Try):
        tried = _most(statement.body, wanted) + _most(statement.orelse, wanted)
        saved = max((_most(handler.body, wanted) for handler in statement.handlers), default=0)
        return max(tried, saved) + _most(statement.finalbody, wanted)
    if isinstance(statement, ast.With | ast.AsyncWith):
        return _in_expressions([item.context_expr for item in statement.items], wanted) + _most(statement.body, wanted)
    if isinstance(statement, ast.Match):
        return max((_most(case.body, wanted) for case in statement.cases), default=0)
    return _in_expressions([statement], wanted)


def _in_expressions(nodes: Iterable[ast.AST], wanted: set[str]) -> int:
    return sum(1 for node in nodes for call in _calls(node) if ast.unparse(call.func) in wanted)

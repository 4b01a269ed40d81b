"""Calls in the user's source: the call at a position, and the maximum number of calls in one run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

MANY = 2  # lower bound of the calls inside a loop


def most_calls(file: str, line: int | None, *names: str) -> int:
    """Return the maximum number of calls of these names in one run; 1 for an unreadable source.

    With a line, calls of the same method on the same object as in that line are counted. The
    branches of an `if` are alternatives, and a call in a loop counts as several.
    """
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return 1
    wanted = {
        ast.unparse(call.func)
        for call in _calls(tree)
        if _name(call) in names and (line is None or call.lineno <= line <= (call.end_lineno or call.lineno))
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return max(1, *(_most(scope.body, wanted) for scope in (tree, *functions)))


def call_at(tree: ast.Module, line: int, span: tuple[int, int, int, int] | None) -> ast.Call | None:
    """Return the call with this span; without a span, the only call of a `...Config` in this line."""
    calls = list(_calls(tree))
    if span is not None:
        spans = {(call.lineno, call.end_lineno, call.col_offset, call.end_col_offset): call for call in reversed(calls)}
        return spans.get(span)
    there = [call for call in calls if call.lineno <= line <= (call.end_lineno or call.lineno)]
    with_configs = [call for call in there if (_name(call) or "").endswith("Config")]
    return with_configs[0] if len(with_configs) == 1 else None


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _name(call: ast.Call) -> str | None:
    """Return the last part of the name: `train` of `trainer.train()`."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else None


def _most(body: Sequence[ast.stmt], wanted: set[str]) -> int:
    """Return the calls on the longest path. Statements after a branch that leaves are its alternative."""
    total = 0
    for index, statement in enumerate(body):
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break):
            rest = [*statement.orelse, *body[index + 1 :]]
            return total + _in_expressions([statement.test], wanted) + max(_most(statement.body, wanted), _most(rest, wanted))
        total += _of(statement, wanted)
    return total


def _of(statement: ast.stmt, wanted: set[str]) -> int:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return 0
    if isinstance(statement, ast.If):
        branches = max(_most(statement.body, wanted), _most(statement.orelse, wanted))
        return _in_expressions([statement.test], wanted) + branches
    if isinstance(statement, ast.For | ast.While | ast.AsyncFor):
        return _most(statement.body, wanted) * MANY + _most(statement.orelse, wanted)
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

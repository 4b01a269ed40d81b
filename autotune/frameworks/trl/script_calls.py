"""Number of calls in one run of a script, from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

MANY = 2
"""Lower bound of the calls inside a loop."""

_LEAVING = ast.Return | ast.Raise | ast.Continue | ast.Break


def most_calls(file: str, line: int | None, *names: str) -> int:
    """Return the maximum number of calls of these names in one run; 1 for an unreadable source.

    With a line, calls of the same method on the same object as in that line are counted. The
    branches of an `if` are alternatives, and a call in a loop counts as several.
    """
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return 1
    # 1. Functions whose calls are counted, as source text.
    functions = set()
    for call in _calls(tree):
        function = call.func
        name = getattr(function, "attr", getattr(function, "id", None))
        if name in names and (line is None or _is_at(call, line)):
            functions.add(ast.unparse(function))
    # 2. The longest path through the module, or through one function.
    blocks = [tree.body]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            blocks.append(node.body)
    counter = _CallCounter(functions)
    return max(1, counter.most(blocks))


def called_names(file: str, *names: str) -> frozenset[str]:
    """Return those of the names that the source calls anywhere; none of an unreadable source."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    called = set()
    for call in _calls(tree):
        name = getattr(call.func, "attr", getattr(call.func, "id", None))
        if name in names:
            called.add(name)
    return frozenset(called)


def _is_at(call: ast.Call, line: int) -> bool:
    last_line = call.end_lineno or call.lineno
    return call.lineno <= line <= last_line


def _leaves(statement: ast.stmt) -> TypeGuard[ast.If]:
    """Return True for a branch that ends with `return` or the like."""
    return isinstance(statement, ast.If) and isinstance(statement.body[-1], _LEAVING)


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node


class _CallCounter:
    """Counts the calls of some functions on the longest path through statements."""

    def __init__(self, counted: set[str]) -> None:
        self._counted = counted

    def most(self, blocks: Iterable[Sequence[ast.stmt]]) -> int:
        """Return the calls of the block with the most."""
        return max(map(self._in_block, blocks), default=0)

    def _in_block(self, block: Sequence[ast.stmt]) -> int:
        """Return the calls of a block. Statements after a branch that leaves are its
        alternative.
        """
        total = 0
        for index, statement in enumerate(block):
            if _leaves(statement):
                following = block[index + 1 :]
                alternative = [*statement.orelse, *following]
                branches = self.most([statement.body, alternative])
                tested = self._in_expression(statement.test)
                return total + tested + branches
            total += self._in_statement(statement)
        return total

    def _in_statement(self, statement: ast.stmt) -> int:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return 0
            case ast.If():
                branches = self.most([statement.body, statement.orelse])
                tested = self._in_expression(statement.test)
                return tested + branches
            case ast.For() | ast.While() | ast.AsyncFor():
                repeated = MANY * self._in_block(statement.body)
                at_end = self._in_block(statement.orelse)
                return repeated + at_end
            case ast.Try():
                completed = self._in_block(statement.body)
                completed += self._in_block(statement.orelse)
                handled = self.most(handler.body for handler in statement.handlers)
                at_end = self._in_block(statement.finalbody)
                return max(completed, handled) + at_end
            case ast.With() | ast.AsyncWith():
                opened = 0
                for item in statement.items:
                    opened += self._in_expression(item.context_expr)
                return opened + self._in_block(statement.body)
            case ast.Match():
                return self.most(case.body for case in statement.cases)
        return self._in_expression(statement)

    def _in_expression(self, node: ast.AST) -> int:
        count = 0
        for call in _calls(node):
            count += ast.unparse(call.func) in self._counted
        return count

"""Number of calls in one run of a script, from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

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
    counted = set()
    for call in _calls(tree):
        name = getattr(call.func, "attr", getattr(call.func, "id", None))
        last_line = call.end_lineno or call.lineno
        if name in names and (line is None or call.lineno <= line <= last_line):
            counted.add(ast.unparse(call.func))
    # 2. The longest path through the module, or through one function.
    blocks = [tree.body]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            blocks.append(node.body)
    return max(1, _CallCounter(counted).most(blocks))


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


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
            if isinstance(statement, ast.If) and isinstance(statement.body[-1], _LEAVING):
                alternative = [*statement.orelse, *block[index + 1 :]]
                branches = self.most([statement.body, alternative])
                return total + self._in_expression(statement.test) + branches
            total += self._in_statement(statement)
        return total

    def _in_statement(self, statement: ast.stmt) -> int:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return 0
            case ast.If():
                branches = self.most([statement.body, statement.orelse])
                return self._in_expression(statement.test) + branches
            case ast.For() | ast.While() | ast.AsyncFor():
                repeated = MANY * self._in_block(statement.body)
                return repeated + self._in_block(statement.orelse)
            case ast.Try():
                completed = self._in_block(statement.body)
                completed += self._in_block(statement.orelse)
                handled = self.most(handler.body for handler in statement.handlers)
                return max(completed, handled) + self._in_block(statement.finalbody)
            case ast.With() | ast.AsyncWith():
                opened = [self._in_expression(item.context_expr) for item in statement.items]
                return sum(opened) + self._in_block(statement.body)
            case ast.Match():
                return self.most(case.body for case in statement.cases)
        return self._in_expression(statement)

    def _in_expression(self, node: ast.AST) -> int:
        functions = [ast.unparse(call.func) for call in _calls(node)]
        return sum(function in self._counted for function in functions)

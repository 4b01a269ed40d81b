"""The user's files as they are compiled: in a later Python's syntax, and without checks that only
the machine of their author passes.

A check is an `assert`, or a `raise` or an exit directly below an `if`. One that ended the script is
passed over in the next run of it, where the request names its place: `Check`. Whether it may be is
decided there.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from ..tracing.patching import attribute
from .later_syntax import before_3_12

EXITS = frozenset({"exit", "quit", "_exit"})
MOST_TOLD = 300  # of a check that is told


class Check(NamedTuple):
    """Statement that ends a script under a condition."""

    file: str
    line: int


_passed_over: set[Check] = set()


def compiled(content: bytes, file: str) -> CodeType:
    """Compile a file of the user's without the checks that are passed over."""
    tree = tree_of(content, file)
    lines = {check.line for check in _passed_over if check.file == file}
    if lines:
        tree = _WithoutChecks(lines).visit(tree)
        ast.fix_missing_locations(tree)
    # Annotations are the script's own: this file's `from __future__` must not apply to it.
    code: CodeType = compile(tree, file, "exec", dont_inherit=True)
    return code


def tree_of(content: bytes, file: str) -> ast.Module:
    """Parse a file, which may have the syntax of a later Python."""
    try:
        return ast.parse(content, filename=file)
    except SyntaxError:
        try:
            return ast.parse(before_3_12(importlib.util.decode_source(content)), filename=file)
        except (SyntaxError, ValueError, IndexError):
            pass
        raise


class _WithoutChecks(ast.NodeTransformer):
    """Replaces the checks in these lines by nothing."""

    def __init__(self, lines: Collection[int]) -> None:
        self._lines = lines

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt) and node.lineno in self._lines and _ends_script(node):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)


def _ends_script(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise | ast.Assert):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    name = getattr(function, "attr", getattr(function, "id", ""))
    return name in EXITS


@contextmanager
def without_checks(
    places: Collection[Check],
    is_library: Callable[[str], bool],
) -> Iterator[None]:
    """Compile the modules that the user's files import like the script itself."""
    get_code = importlib.machinery.SourceFileLoader.get_code

    def code_of(loader: Any, name: str) -> Any:
        file = loader.get_filename(name)
        if is_library(file):
            return get_code(loader, name)
        return compiled(loader.get_data(file), file)

    _passed_over.update(places)
    with attribute(importlib.machinery.SourceFileLoader, "get_code", code_of):
        yield


def check_of(error: BaseException, is_library: Callable[[str], bool]) -> dict[str, Any] | None:
    """Return place and text of the check that raised the error; None: it was no check."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return None
    frame, line = frames[-1]
    file = frame.f_code.co_filename
    if is_library(file):
        return None
    try:
        tree = tree_of(Path(file).read_bytes(), file)
    except (OSError, SyntaxError):
        return None
    for node in ast.walk(tree):
        for statement in _checked(node):
            last_line = statement.end_lineno or statement.lineno
            if statement.lineno <= line <= last_line:
                text = ast.unparse(statement)
                if isinstance(node, ast.If):
                    text = f"{ast.unparse(node.test)} {text}"
                return {
                    "file": file,
                    "line": statement.lineno,
                    "text": text[:MOST_TOLD],
                }
    return None


def _checked(node: ast.AST) -> list[ast.stmt]:
    """Return the statements of a node that are checks."""
    if isinstance(node, ast.Assert):
        return [node]
    if isinstance(node, ast.If):
        return [statement for statement in node.body if _ends_script(statement)]
    return []

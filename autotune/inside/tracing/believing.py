"""Functions that look at a tensor's device to choose their way, made to believe that it is CUDA.

Such a question (`tensor.device.type == "cuda"`) stands in the middle of a function and cannot be answered from outside. So the
function is compiled once more from its own source, with exactly these comparisons answered; everything else in it stays.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .swap import attribute, swapped


@contextmanager
def on_cuda(package: str, where: Callable[[str], bool]) -> Iterator[None]:
    """Meanwhile the functions of this package's modules (those that `where` picks by name) choose as on CUDA.

    Wherever else in the package a function was imported to, it is replaced as well.
    """
    modules = {name: module for name, module in list(sys.modules.items()) if name.split(".")[0] == package}
    believers = {
        id(found): believer
        for name, module in modules.items()
        if where(name)
        for found in list(vars(module).values())
        if isinstance(found, types.FunctionType) and found.__module__ == name and (believer := believing(found)) is not None
    }
    with contextlib.ExitStack() as stack:
        for module in modules.values():
            for name, value in list(vars(module).items()):
                if id(value) in believers:
                    stack.enter_context(swapped(vars(module), name, believers[id(value)]))
        yield


@contextmanager
def attention_on_cuda() -> Iterator[None]:
    """The same for methods of loaded models that call torch's attention: some copy what they give it, on CUDA only."""
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if not (name.startswith("transformers.models.") and ".modeling_" in name):
                continue
            for kind in [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]:
                for method, function in list(vars(kind).items()):
                    if isinstance(function, types.FunctionType) and "scaled_dot_product_attention" in function.__code__.co_names:
                        believer = believing(function)
                        if believer is not None:
                            stack.enter_context(attribute(kind, method, believer))
        yield


@functools.cache
def believing(function: types.FunctionType) -> Any:
    """The function with its questions about CUDA answered yes; None for one that asks none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    answers = _Answers()
    tree = ast.fix_missing_locations(answers.visit(tree))
    definition = tree.body[0]
    if not answers.given or not isinstance(definition, ast.FunctionDef) or function.__closure__:
        return None
    definition.decorator_list = []
    ast.increment_lineno(definition, function.__code__.co_firstlineno - 1)
    future = ast.parse("from __future__ import annotations").body
    names: dict[str, Any] = {}
    exec(compile(ast.Module([*future, definition], []), inspect.getfile(function), "exec"), function.__globals__, names)
    made = names[function.__name__]
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made


class _Answers(ast.NodeTransformer):
    """`x.type == "cuda"`, `x.type in ("cuda", ...)`, `x.is_cuda`, and their opposites."""

    def __init__(self) -> None:
        self.given = 0

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if len(node.ops) != 1 or not (isinstance(node.left, ast.Attribute) and node.left.attr == "type"):
            return node
        right = node.comparators[0]
        constants = [part.value for part in ast.walk(right) if isinstance(part, ast.Constant)]
        if "cuda" not in constants:
            return node
        self.given += 1
        return ast.Constant(isinstance(node.ops[0], (ast.Eq, ast.In)))

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if node.attr != "is_cuda" or not isinstance(node.ctx, ast.Load):
            return node
        self.given += 1
        return ast.Constant(True)

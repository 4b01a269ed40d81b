"""Functions that choose by a tensor's device, recompiled so that the device is CUDA.

A check such as `tensor.device.type == "cuda"` in the middle of a function cannot be changed from outside. So the function
is compiled again from its source, with these comparisons replaced by their result on CUDA; the rest is unchanged.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from .patching import all_entered, attribute, swapped


@all_entered
def on_cuda(package: str, where: Callable[[str], bool]) -> Iterator[AbstractContextManager[None]]:
    """Let the functions of a package's modules, selected by `where`, choose as on CUDA.

    A function is replaced in every module of the package that has imported it.
    """
    modules = {name: module for name, module in list(sys.modules.items()) if name.split(".")[0] == package}
    patched = {
        id(found): changed
        for name, module in modules.items()
        if where(name)
        for found in list(vars(module).values())
        if isinstance(found, types.FunctionType) and found.__module__ == name and (changed := recompiled(found)) is not None
    }
    for module in modules.values():
        for name, value in list(vars(module).items()):
            if id(value) in patched:
                yield swapped(vars(module), name, patched[id(value)])


@all_entered
def attention_on_cuda() -> Iterator[AbstractContextManager[None]]:
    """Let models' methods that call torch's attention choose as on CUDA: some copy inputs."""
    for name, module in list(sys.modules.items()):
        if not (name.startswith("transformers.models.") and ".modeling_" in name):
            continue
        for kind in [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]:
            for method, function in list(vars(kind).items()):
                if isinstance(function, types.FunctionType) and "scaled_dot_product_attention" in function.__code__.co_names:
                    changed = recompiled(function)
                    if changed is not None:
                        yield attribute(kind, method, changed)


@functools.cache
def recompiled(function: types.FunctionType) -> Any:
    """Return the function with its CUDA checks answered; None if it has none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    checks = _CudaChecks()
    tree = ast.fix_missing_locations(checks.visit(tree))
    definition = tree.body[0]
    if not checks.count or not isinstance(definition, ast.FunctionDef) or function.__closure__:
        return None
    definition.decorator_list = []
    ast.increment_lineno(definition, function.__code__.co_firstlineno - 1)
    future = ast.parse("from __future__ import annotations").body
    names: dict[str, Any] = {}
    exec(compile(ast.Module([*future, definition], []), inspect.getfile(function), "exec"), function.__globals__, names)
    made = names[function.__name__]
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made


class _CudaChecks(ast.NodeTransformer):
    """Replaces `x.type == "cuda"`, `x.type in ("cuda", ...)`, `x.is_cuda`, and their opposites."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if len(node.ops) != 1 or not (isinstance(node.left, ast.Attribute) and node.left.attr == "type"):
            return node
        right = node.comparators[0]
        constants = [part.value for part in ast.walk(right) if isinstance(part, ast.Constant)]
        if "cuda" not in constants:
            return node
        self.count += 1
        return ast.Constant(isinstance(node.ops[0], (ast.Eq, ast.In)))

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if node.attr != "is_cuda" or not isinstance(node.ctx, ast.Load):
            return node
        self.count += 1
        return ast.Constant(True)

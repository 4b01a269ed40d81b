"""Names that benchmarks, tests and the CI's programs import from the package exist, also in
files that no test runs and in programs that are written as text.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("autotune", "benchmarks", "tests", "docs", "examples", ".ci")


def _module(name: str) -> Path | None:
    base = ROOT.joinpath(*name.split("."))
    return next(
        (file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None
    )


@functools.cache
def _defined(file: Path) -> frozenset[str]:
    """Names bound at a module's top level, in branches and `try` blocks too."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names |= {(name.asname or name.name).split(".")[0] for name in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            else:
                waiting.append(node)
    return frozenset(names)


# A line of a program in a string: `from autotune.core.space import Candidate, Choice`.
IMPORT_IN_TEXT = re.compile(
    r"^ *from (?P<module>(?:autotune|tests)[\w.]*) import (?P<names>[\w, ]+)", re.MULTILINE
)


def _imports_in(text: str) -> Iterator[tuple[str, str]]:
    for line in IMPORT_IN_TEXT.finditer(text):
        for name in line["names"].split(","):
            yield line["module"], name.split(" as ")[0].strip()


def _imports(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _imports_in(node.value)
        elif (
            isinstance(node, ast.ImportFrom)
            and node.level == 0
            and (node.module or "").split(".")[0] in ("autotune", "tests")
        ):
            yield from ((node.module or "", name.name) for name in node.names)


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_imported_exists(folder: str) -> None:
    missing = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        for module, name in _imports(file):
            target = _module(module)
            exists = (
                _module(f"{module}.{name}") is not None
                or (target is None and ROOT.joinpath(*module.split(".")).is_dir())
                or (
                    target is not None
                    and ("__getattr__" in _defined(target) or name in _defined(target))
                )
            )
            if not exists:
                missing.append(f"{file.relative_to(ROOT)}: {module}.{name}")
    assert missing == []

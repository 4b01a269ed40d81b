"""Names in the package: one class name has one meaning, one module name has one home."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "autotune"
MAX_MODULES = 8

SHARED_MODULES = {
    "sitecustomize": (
        "Python imports this name at its start; worker.startup and emulator.inject each put one"
        " first on the path"
    ),
    "study": "cli has one module per command, named after it; search.study is the Optuna study",
    "trace": "worker.stand_in.trace records the step that core.trace represents",
}
"""Module name -> reason for more than one home."""


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_a_class_name_has_one_meaning() -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for file in _files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(file.relative_to(PACKAGE)))
    shared = {name: files for name, files in homes.items() if len(files) > 1}
    assert not shared


def test_a_module_name_has_one_home() -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for file in _files():
        if file.stem not in ("__init__", "__main__", "base"):
            homes[file.stem].append(str(file.relative_to(PACKAGE)))
    shared = {name: files for name, files in homes.items() if len(files) > 1}
    assert set(shared) == set(SHARED_MODULES), shared
    assert len(SHARED_MODULES) <= MAX_MODULES

"""Dependencies between files have one direction: no circles among modules, none among C files.

An import counts wherever it stands: at the top, in a function, or under TYPE_CHECKING. Who reads a
circle has to understand all its files at once.

    a.py: from .b import B        b.py: if TYPE_CHECKING: from .a import A        circle {a, b}

A package's `__init__` may hand on names of its modules. An importer of such a name depends on the
module that defines it, not on the package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
C_SOURCES = ROOT / "autotune" / "emulator" / "csrc"

Graph = Mapping[str, set[str]]
"""Names of files, each with the files that it depends on."""


# Circles of a graph.


def circles(graph: Graph) -> set[frozenset[str]]:
    """Return the largest sets of files that all depend on each other."""
    reachable = {node: _reachable(graph, node) for node in graph}
    result = set()
    for node in graph:
        circle = frozenset(
            target for target in reachable[node] if node in reachable.get(target, ())
        )
        if circle:
            result.add(circle)
    return result


def _reachable(graph: Graph, start: str) -> set[str]:
    """Return every node that `start` depends on, directly or through others."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for target in graph.get(waiting.pop(), ()):
            if target not in reached:
                reached.add(target)
                waiting.append(target)
    return reached


# Python modules.


class Import(NamedTuple):
    """One imported name: `from module import name`, or `import module` without a name."""

    module: str
    name: str | None
    bound_name: str  # in the importing file


class Module(NamedTuple):
    name: str
    is_package: bool
    tree: ast.Module

    def imports(self) -> list[Import]:
        """Return the names that the file imports, wherever the import stands."""
        imports = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    imports.append(Import(alias.name, None, alias.asname or alias.name))
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(node)
                for alias in node.names:
                    imports.append(Import(origin, alias.name, alias.asname or alias.name))
        return imports

    def _origin(self, node: ast.ImportFrom) -> str:
        """Return the module's absolute name: `..b` in `package.a.c` is `package.b`."""
        if node.level == 0:
            return node.module or ""
        parents = self.name.split(".")
        if not self.is_package:
            parents.pop()
        base = parents[: len(parents) - (node.level - 1)]
        return ".".join([*base, node.module] if node.module else base)

    def handed_on(self) -> set[str]:
        """Return the names that a package imports only for others: those of `__all__`."""
        if not self.is_package:
            return set()
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return set(ast.literal_eval(node.value))
        return set()


def module_graph(package: Path) -> dict[str, set[str]]:
    """Return the modules of a package with their imports among themselves."""
    modules = {}
    for file in sorted(package.rglob("*.py")):
        module = _read_module(file, package)
        modules[module.name] = module

    graph = {}
    for module in modules.values():
        handed_on = module.handed_on()
        targets = set()
        for statement in module.imports():
            if statement.bound_name not in handed_on:
                targets.add(_definer(statement, modules))
        graph[module.name] = targets & modules.keys()
    return graph


def _read_module(file: Path, package: Path) -> Module:
    parts = list(file.relative_to(package.parent).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    if is_package:
        parts.pop()
    return Module(".".join(parts), is_package, ast.parse(file.read_text()))


def _definer(statement: Import, modules: Mapping[str, Module]) -> str:
    """Return the module that an import depends on: behind packages that hand the name on."""
    if statement.name is None:
        return statement.module
    submodule = f"{statement.module}.{statement.name}"
    if submodule in modules:
        return submodule
    module = modules.get(statement.module)
    if module is not None and module.is_package:
        for source in module.imports():
            if source.bound_name == statement.name:
                return _definer(source, modules)
    return statement.module


def test_modules_import_each_other_without_circles() -> None:
    assert circles(module_graph(ROOT / "autotune")) == set()


@pytest.mark.parametrize(
    "line",
    [
        "from .a import A",
        "from . import a",
        "import package.a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import A",
        "def late():\n    from package import A",
    ],
)
def test_a_circle_of_modules_is_found(line: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from .a import A\n__all__ = ['A']\n")
    (package / "a.py").write_text("from .b import B\n")
    (package / "b.py").write_text(line)
    (package / "c.py").write_text("from . import a, b\n")
    assert circles(module_graph(package)) == {frozenset({"package.a", "package.b"})}


def test_names_that_a_package_hands_on_make_no_circle(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from .a import A\n__all__ = ['A']\nVERSION = 1\n")
    (package / "a.py").write_text("from package import VERSION\n")
    (package / "b.py").write_text("from package import A\n")
    graph = module_graph(package)
    assert graph["package.b"] == {"package.a"}
    assert circles(graph) == set()


# C files. A file and its header are one: account.c and account.h.

_COMMENT_OR_TEXT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_INCLUDE = re.compile(r'^#include "([\w/]+)\.h"', re.MULTILINE)
_FUNCTION = re.compile(
    r"^(?P<head>[A-Za-z_][\w \t*]*?[ *])(?P<name>\w+)\([^;{}]*\)\s*(?P<end>[;{])", re.MULTILINE
)
"""A function at the left margin: its definition (`{`), or its declaration (`;`)."""


def c_graph(folder: Path) -> dict[str, set[str]]:
    """Return the C files with the files that they include, or whose functions they use."""
    texts: dict[str, str] = {}
    graph: dict[str, set[str]] = {}
    for file in sorted([*folder.glob("*.c"), *folder.glob("*.h")]):
        source = file.read_text()
        graph.setdefault(file.stem, set()).update(_INCLUDE.findall(source))
        texts[file.stem] = texts.get(file.stem, "") + _COMMENT_OR_TEXT.sub(" ", source)

    home = {}
    for stem, text in texts.items():
        for name in _functions(text):
            home[name] = stem

    for stem, text in texts.items():
        for name in re.findall(r"\w+", _without_declarations(text)):
            if name in home:
                graph[stem].add(home[name])
        graph[stem].discard(stem)
    return graph


def _functions(text: str) -> set[str]:
    """Return the functions that the text defines for other files."""
    names = set()
    for match in _FUNCTION.finditer(text):
        if match["end"] == "{" and "static" not in match["head"].split():
            names.add(match["name"])
    return names


def _without_declarations(text: str) -> str:
    return _FUNCTION.sub(lambda match: " " if match["end"] == ";" else match[0], text)


def test_c_files_do_not_use_each_other_in_circles() -> None:
    graph = c_graph(C_SOURCES)
    assert graph["runtime_memory"] >= {"memory", "stream"}, "calls are recognised"
    assert circles(graph) == set()


def test_a_circle_of_c_files_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text("int a_number(int x); /* b_number */\n")
    (tmp_path / "a.c").write_text('#include "a.h"\nint a_number(int x) { return b_number(x); }\n')
    (tmp_path / "b.c").write_text(
        'int a_number(int x);\nENTRY int b_number(int x) {\n  return puts("c_number");\n}\n'
    )
    (tmp_path / "c.c").write_text("static int own(void) { return 1; }\nint c_number(void) {}\n")
    assert circles(c_graph(tmp_path)) == set()

    (tmp_path / "b.h").write_text('#include "a.h"\n')
    assert circles(c_graph(tmp_path)) == {frozenset({"a", "b"})}

"""Every constant of the search has its kind on the page of constants, and none that is gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEARCH = ROOT / "autotune/search"
PAGE = ROOT / "benchmarks/results/search-constants.md"


def constants_of(source: Path) -> Iterator[str]:
    for statement in ast.parse(source.read_text()).body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id.lstrip("_").isupper():
                yield target.id


def listed() -> dict[str, set[str]]:
    """Return the constants of the page's list, by file."""
    section = PAGE.read_text().partition("\n## List of all constants\n")[2]
    names: dict[str, set[str]] = {}
    for line in section.splitlines():
        row = re.match(r"\| `([\w/]+\.py)` \| (.*) \|$", line)
        if row:
            names.setdefault(row[1], set()).update(re.findall(r"`(\w+)`", row[2]))
    return names


def test_the_page_lists_every_constant() -> None:
    constants: dict[str, set[str]] = {}
    for source in SEARCH.rglob("*.py"):
        names = set(constants_of(source))
        if names:
            constants[source.relative_to(SEARCH).as_posix()] = names
    assert listed() == constants

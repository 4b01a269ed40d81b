"""Every constant of the search has its kind on the page of constants, and none that is gone."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEARCH = ROOT / "autotune/search"
PAGE = ROOT / "benchmarks/results/search-constants.md"
sys.path.insert(0, str(ROOT / "benchmarks"))

from search_constants import PAIRS  # noqa: E402


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


def listed(heading: str = "## List of all constants") -> dict[str, set[str]]:
    """Return the constants of the page's list after this heading, by file."""
    section = PAGE.read_text().partition(f"\n{heading}")[2]
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


def test_every_tuned_constant_is_compared_with_other_values() -> None:
    tuned = set()
    for source, names in listed("### Tuned numbers").items():
        module = source.removesuffix(".py").replace("/", ".")
        for name in names:
            tuned.add((module, name))
    compared = set()
    for name, (module, values) in PAIRS.items():
        compared.add((module, name))
        assert values
    # How long a training is assumed to be is no tuned number, but compared all the same.
    assert compared == {*tuned, ("confirmation", "TRAINING_SECONDS")}

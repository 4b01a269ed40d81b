"""Which tests are asked about a mutant: the cheapest of those that execute its line, first.

Tests of the room that the mutant is in come before others. Variants of one test tell little more
than the first of them: the second of each comes after the first of all.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.mutants.executed_lines import Executed
from tests.mutants.sites import Mutant


def tests_of(
    mutant: Mutant,
    executed: Executed,
    files: Sequence[Path],
    root: Path,
    budget_s: float,
    former_test: str = "",
) -> list[str]:
    """Return the tests that may notice a mutant, the cheapest first, up to a sum of seconds.

    Tests in the same files come last: what is cached is executed by the first test that asks. The
    test that noticed it in a former reading comes first.
    """
    if mutant.at_import:
        names = _names_defined_at(root / mutant.file, mutant.line)
        executing = _tests_with_names(names, executed, files, root)
    else:
        executing = executed.tests_by_line.get((mutant.file, mutant.line), frozenset())
    neighbours = _in_the_same_files(executing, executed)
    room = "tests/" + mutant.file.split("/")[1] + "/"
    if not executing:
        neighbours = {test for test in executed.seconds if test.startswith(room)}
    ordered = _in_order(executing, executed, room)
    ordered += _in_order(neighbours - executing, executed, room)
    if former_test in executed.seconds:
        ordered.insert(0, former_test)
    return _within(list(dict.fromkeys(ordered)), executed, budget_s)


def _in_the_same_files(tests: Iterable[str], executed: Executed) -> set[str]:
    neighbours: set[str] = set()
    for file in {test.partition("::")[0] for test in tests}:
        neighbours.update(executed.by_test_file[file])
    return neighbours


def _in_order(
    tests: Iterable[str],
    executed: Executed,
    room: str,
) -> list[str]:
    by_cost = sorted(tests, key=lambda test: (executed.seconds[test], test))
    variants: Counter[str] = Counter()
    places = {}
    for test in by_cost:
        name = test.partition("[")[0]
        places[test] = (variants[name], not test.startswith(room))
        variants[name] += 1
    return sorted(by_cost, key=places.__getitem__)  # equal ones stay in the order of their cost


def _within(
    tests: Sequence[str],
    executed: Executed,
    budget_s: float,
) -> list[str]:
    chosen: list[str] = []
    for test in tests:
        budget_s -= executed.seconds[test]
        if budget_s < 0 and chosen:
            break
        chosen.append(test)
    return chosen


def _names_defined_at(file: Path, line: int) -> set[str]:
    """Return the names that the statement at a line defines: a constant, a field, a function."""
    innermost: ast.stmt | None = None
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or 0):
            continue
        if innermost is None or node.lineno >= innermost.lineno:
            innermost = node
    if isinstance(innermost, ast.FunctionDef | ast.ClassDef):
        return {innermost.name}
    if innermost is None:
        return set()
    stored = set()
    for node in ast.walk(innermost):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored.add(node.id)
    return stored


def _tests_with_names(
    names: set[str],
    executed: Executed,
    files: Sequence[Path],
    root: Path,
) -> frozenset[str]:
    """Return the tests that execute a line which mentions one of the names."""
    if not names:
        return frozenset()
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, sorted(names))) + r")\b")
    tests: set[str] = set()
    for file in files:
        for number, text in enumerate(file.read_text().splitlines(), 1):
            if pattern.search(text):
                place = (file.relative_to(root).as_posix(), number)
                tests |= executed.tests_by_line.get(place, frozenset())
    return frozenset(tests)

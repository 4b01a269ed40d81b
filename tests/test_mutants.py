"""Mutants: what is changed, and that a test which notices is told from one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.sites import Mutant, mutants_of, sample

TEXT = '''"""Module."""
LIMIT = 3


def share(used: int, total: int = 8) -> int:
    if used > LIMIT and not total:
        return max(used - 1, total)
    return used  # é, so that offsets are of bytes
'''


@pytest.fixture
def mutants(tmp_path: Path) -> list[Mutant]:
    file = tmp_path / "module.py"
    file.write_text(TEXT)
    return mutants_of(file, tmp_path)


def test_each_kind_of_change_is_made_once(mutants: list[Mutant]) -> None:
    changes = {(mutant.before, mutant.after) for mutant in mutants}
    assert changes == {
        ("3", "(4)"),
        ("8", "(9)"),
        ("used > LIMIT", "(used >= LIMIT)"),
        ("used > LIMIT and not total", "(used > LIMIT or not total)"),
        ("used > LIMIT and not total", "(used > LIMIT)"),
        ("not total", "(total)"),
        ("max(used - 1, total)", "(min(used - 1, total))"),
        ("used - 1", "(used + 1)"),
        ("used - 1", "(used)"),
        ("1", "(2)"),
    }


def test_only_the_expression_changes(mutants: list[Mutant]) -> None:
    for mutant in mutants:
        changed = mutant.applied_to(TEXT)
        compile(changed, mutant.file, "exec")
        assert len(changed) - len(TEXT) == len(mutant.after) - len(mutant.before)


def test_what_an_import_executes_is_told_apart(mutants: list[Mutant]) -> None:
    at_import = {mutant.before for mutant in mutants if mutant.at_import}
    assert at_import == {"3", "8"}


def test_a_seed_chooses_the_same_lines_again(mutants: list[Mutant]) -> None:
    chosen = sample(mutants, 4, seed=1)
    assert chosen == sample(list(reversed(mutants)), 4, seed=1)
    assert len({mutant.line for mutant in chosen}) == 4

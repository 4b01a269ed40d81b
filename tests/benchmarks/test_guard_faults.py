"""Page of the faults of a guarded run: each test has a row, and counts are those of the runs."""

from __future__ import annotations

import ast

from benchmarks.guard_faults import TESTS, TITLES, FaultRun, page_of


def _run(
    test: str,
    number: int,
    fault: str = "",
    *,
    passed: bool = True,
) -> FaultRun:
    return FaultRun(
        test=test,
        fault=fault,
        run=number,
        passed=passed,
        seconds=1.0 + number,
        code="0",
    )


def test_each_test_has_a_row() -> None:
    tests = set()
    for node in ast.parse(TESTS.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            tests.add(node.name)
    assert set(TITLES) == tests


def test_a_row_counts_its_runs() -> None:
    torn = "test_a_torn_checkpoint_is_skipped"
    out_of_memory = "test_out_of_memory_anywhere_is_restarted_smaller"
    runs = [
        _run(out_of_memory, 0, "load"),
        _run(torn, 0),
        _run(torn, 2, passed=False),
        _run(out_of_memory, 1, "saving"),
    ]
    rows = [line for line in page_of(runs).splitlines() if line.startswith("|")]
    assert rows[2:] == [
        "| newest checkpoint torn | 2 | 1 | 3.0 |",
        "| out of memory: load | 1 | 1 | 1.0 |",
        "| out of memory: saving | 1 | 1 | 2.0 |",
    ]

"""Page of the faults of a guarded run: each test has a row, and counts are those of the runs."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import guard_faults
from benchmarks.guard_faults import TESTS, TITLES, FaultRun, page_of, stored_runs


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


def test_a_run_of_two_slices_counts_once_and_other_code_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run("test_a_torn_checkpoint_is_skipped", 0)
    again = replace(run, seconds=9.0)
    of_other_code = replace(run, run=1, code="1")
    lines = [json.dumps(asdict(stored)) + "\n" for stored in (run, again, of_other_code)]
    monkeypatch.setattr(guard_faults, "LINES", tmp_path / "runs.jsonl")
    (tmp_path / "runs.jsonl").write_text("".join(lines))
    assert stored_runs("0") == [run]

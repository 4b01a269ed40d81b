"""Faults of a guarded run, twenty times each, in slices that go on where the last one ended.

    python benchmarks/guard_faults.py [--seconds 200] [--backwards]

A run is one test of tests/guard/test_faults.py. Each result is a line of guard-faults.jsonl. Lines
of other code (by a digest of the guard, its keeper and these tests) are dropped. The page is
written from the lines after each slice. Two slices may run at once, one of them backwards: each
leaves out what the other has stored.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LINES = RESULTS / "guard-faults.jsonl"
PAGE = RESULTS / "guard-faults.md"
TESTS = ROOT / "tests" / "guard" / "test_faults.py"
CODE = (
    "autotune/guard/*.py",
    "autotune/worker/keeper.py",
    "autotune/worker/processes.py",
    "tests/guard/test_faults.py",
    "tests/guard/guarded.py",
    "tests/guard/child.py",
)
RUNS = 20
RUNS_VARIABLE = "GUARD_FAULT_RUNS"

TITLES = {
    "test_a_killed_guard_leaves_no_process_and_is_resumed": "guard killed, then `--resume`",
    "test_a_killed_command_is_restarted_unchanged": "command killed",
    "test_a_killed_keeper_leaves_no_process": "keeper killed",
    "test_guard_and_command_killed_at_once": "guard and command killed at once, then `--resume`",
    "test_sigterm_during_a_checkpoint": "SIGTERM during a checkpoint, then `--resume`",
    "test_a_torn_checkpoint_is_skipped": "newest checkpoint torn",
    "test_a_full_disk_is_no_reason_to_try_again": "disk full while saving",
    "test_the_disk_of_our_own_output_is_full": "disk full for our own output",
    "test_out_of_memory_anywhere_is_restarted_smaller": "out of memory",
    "test_memory_that_runs_out_each_time_ends_with_code_3": "out of memory each time",
    "test_a_machine_that_fails_each_time_ends_after_the_restarts": "machine fails each time",
    "test_a_lost_machine_is_restarted_unchanged": "machine fails once",
    "test_a_bug_is_never_tried_again": "error of the script",
    "test_a_command_that_ignores_signals_is_ended_by_the_second": "command ignores signals",
}

HEAD = """# Faults of a guarded run

`make test-guard-faults`: `tests/guard/test_faults.py`, a plain training of 12 steps beside other
work, a signal at another moment in each run. A run passes if no sample is lost or seen twice, no
process is left, and no configuration is tried twice. Each fault is run twenty times, in slices; the
rows count the runs of this code so far.

| fault | runs | passed | seconds, longest |
|---|---|---|---|
"""


@dataclass(frozen=True, kw_only=True)
class FaultRun:
    """Result of one run of a fault."""

    test: str
    fault: str  # of a test with several
    run: int
    passed: bool
    seconds: float
    code: str  # digest

    @property
    def key(self) -> tuple[str, str, int]:
        return self.test, self.fault, self.run

    @property
    def title(self) -> str:
        """Row of the page. A test without one fails here."""
        title = TITLES[self.test]
        return f"{title}: {self.fault}" if self.fault else title


def code_digest() -> str:
    digest = hashlib.sha256()
    for pattern in CODE:
        for file in sorted(ROOT.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def stored_runs(code: str) -> list[FaultRun]:
    """Return the runs of this code so far."""
    runs: dict[tuple[str, str, int], FaultRun] = {}
    if LINES.exists():
        for line in LINES.read_text().splitlines():
            run = FaultRun(**json.loads(line))
            if run.code == code:
                runs.setdefault(run.key, run)
    return list(runs.values())


class FaultSlice:
    """Plugin of pytest: leaves out what was run, stores each result, and stops when time is up."""

    def __init__(
        self,
        code: str,
        seconds: float,
        *,
        backwards: bool,
    ) -> None:
        self.code = code
        self._backwards = backwards
        self._deadline = time.monotonic() + seconds
        self._session: pytest.Session | None = None
        self._keys: dict[str, tuple[str, str, int]] = {}

    @property
    def remaining(self) -> int:
        return len(set(self._keys.values()) - self._stored())

    def _stored(self) -> set[tuple[str, str, int]]:
        return {run.key for run in stored_runs(self.code)}

    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        """Sort by the number of the run, so that every fault has as many."""
        self._session = session
        for item in items:
            assert isinstance(item, pytest.Function)
            values = item.callspec.params
            key = (item.originalname, str(values.get("fault", "")), int(str(values["run"])))
            self._keys[item.nodeid] = key
        items.sort(key=lambda item: self._keys[item.nodeid][2], reverse=self._backwards)

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Leave out a run that is stored by now."""
        return True if self._keys[item.nodeid] in self._stored() else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the result of a call, or of a set-up that failed."""
        if report.when != "call" and not (report.when == "setup" and report.failed):
            return
        test, fault, number = self._keys[report.nodeid]
        run = FaultRun(
            test=test,
            fault=fault,
            run=number,
            passed=report.passed,
            seconds=round(report.duration, 2),
            code=self.code,
        )
        with LINES.open("a") as lines:
            lines.write(json.dumps(asdict(run)) + "\n")
        if self._session is not None and time.monotonic() > self._deadline:
            self._session.shouldstop = "the slice's time is up"


def page_of(runs: Sequence[FaultRun]) -> str:
    """Return the page: a row for each fault, in the order of the titles."""
    by_title: dict[str, list[FaultRun]] = {}
    order = list(TITLES)
    for run in sorted(runs, key=lambda run: (order.index(run.test), run.fault)):
        by_title.setdefault(run.title, []).append(run)
    rows = []
    for title, same_fault in by_title.items():
        passed = sum(run.passed for run in same_fault)
        longest = max(run.seconds for run in same_fault)
        rows.append(f"| {title} | {len(same_fault)} | {passed} | {longest:.1f} |\n")
    return HEAD + "".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=math.inf, help="length of a slice")
    parser.add_argument("--backwards", action="store_true", help="begin with the last runs")
    arguments = parser.parse_args()
    os.environ.setdefault(RUNS_VARIABLE, str(RUNS))

    # 1. Drop the lines of other code, so that the file holds what the page shows.
    code = code_digest()
    if LINES.exists() and f'"{code}"' not in LINES.read_text():
        LINES.write_text("")

    # 2. One slice.
    fault_slice = FaultSlice(code, arguments.seconds, backwards=arguments.backwards)
    os.chdir(ROOT)
    pytest.main(["-q", "-p", "no:cacheprovider", str(TESTS)], plugins=[fault_slice])

    # 3. The page.
    runs = stored_runs(code)
    PAGE.write_text(page_of(runs))
    failed = sum(not run.passed for run in runs)
    print(f"{len(runs)} runs, {failed} failed, {fault_slice.remaining} are left")
    return 1 if failed or fault_slice.remaining else 0


if __name__ == "__main__":
    sys.exit(main())

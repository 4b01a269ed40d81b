"""Which tests execute which lines, and how long each takes: measured once, file by file.

A file of tests is measured again when it changed, or a file of the package that it executes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.processes import in_fork

LIMIT_S = 90.0  # for the tests of one file
CPU_LIMIT_S = 30.0  # after it the rest of a file is left out: a mutant needs cheap tests


@dataclass(frozen=True, kw_only=True)
class Executed:
    """What each test executes. A test that failed without any mutant is not among them."""

    tests_by_line: Mapping[tuple[str, int], frozenset[str]]
    seconds: Mapping[str, float]
    by_test_file: Mapping[str, Sequence[str]] = field(repr=False)


class Recorder:
    """Pytest plugin: while one file's tests run, note their seconds and whether they passed."""

    def __init__(self, recorder: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self._recorder = recorder

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._recorder.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.outcome != "passed":
            self.failed.add(report.nodeid)


def measure(
    items: Sequence[pytest.Item],
    sources: Sequence[str],
    log: Path,
) -> None:
    """Run the tests of one file in a fork, and append what they execute to the log."""
    status = in_fork(lambda: _run_recorded(items, sources, log), LIMIT_S)
    if status != 0:
        file = _file_of(items[0].nodeid)
        _append({"file": file, "digests": _digests([file])}, log)


def _run_recorded(
    items: Sequence[pytest.Item],
    sources: Sequence[str],
    log: Path,
) -> None:
    import coverage

    tracer = coverage.Coverage(
        data_file=None,
        include=[f"{source}/*" for source in sources],
        config_file=False,
    )
    tracer.set_option("run:core", "ctrace")
    tracer.start()
    recorder = Recorder(tracer)
    items[0].config.pluginmanager.register(recorder)
    begin = time.process_time()
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if time.process_time() - begin > CPU_LIMIT_S:
            break
    tracer.stop()
    data = tracer.get_data()
    lines: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for file in data.measured_files():
        name = str(Path(file).relative_to(Path.cwd()))
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                lines[context][name].append(line)
    for test in recorder.failed:
        recorder.seconds.pop(test)
    test_file = _file_of(items[0].nodeid)
    executed_files = {file for test in recorder.seconds for file in lines[test]}
    row = {
        "file": test_file,
        "digests": _digests([test_file, *executed_files]),
        "seconds": recorder.seconds,
        "lines": {test: lines[test] for test in recorder.seconds},
    }
    _append(row, log)


def _append(row: Mapping[str, Any], log: Path) -> None:
    """Append a row in one write: several processes may do so at the same time."""
    with log.open("ab", buffering=0) as lines:
        lines.write(json.dumps(row).encode() + b"\n")


def measured_files(log: Path) -> set[str]:
    return {row["file"] for row in _rows(log)}


def read(log: Path, collected: Collection[str] | None = None) -> Executed:
    """Return what the tests execute; of those that are collected, if these are given."""
    tests_by_line: dict[tuple[str, int], set[str]] = defaultdict(set)
    by_test_file: dict[str, list[str]] = defaultdict(list)
    seconds: dict[str, float] = {}
    for row in _rows(log):
        for test, duration in row.get("seconds", {}).items():
            if collected is not None and test not in collected:
                continue
            seconds[test] = duration
            by_test_file[row["file"]].append(test)
            lines_by_file = row["lines"][test]
            for file, lines in lines_by_file.items():
                for line in lines:
                    tests_by_line[file, line].add(test)
    frozen = {place: frozenset(tests) for place, tests in tests_by_line.items()}
    return Executed(
        tests_by_line=frozen,
        seconds=seconds,
        by_test_file=by_test_file,
    )


def _rows(log: Path) -> list[dict[str, Any]]:
    """Return the last row of each file of tests, unless what it executed has changed."""
    if not log.exists():
        return []
    rows = {}
    for line in log.read_text().splitlines():
        row = json.loads(line)
        rows[row["file"]] = row
    return [row for row in rows.values() if row["digests"] == _digests(row["digests"])]


def _digests(files: Iterable[str]) -> dict[str, str]:
    """Return a digest of each file in the current folder; "" where it is no more."""
    digests = {}
    for name in files:
        file = Path(name)
        digests[name] = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""
    return digests


def _file_of(test: str) -> str:
    return test.partition("::")[0]

"""Which tests execute which lines: measured once by running the fast tests under coverage."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

Tests = frozenset[str]
SETTINGS = """
[run]
source = autotune
data_file = {data}
parallel = True
core = ctrace
relative_files = True
disable_warnings = no-data-collected
"""


def measure(
    root: Path,
    data: Path,
    tests: Sequence[str],
) -> None:
    """Run these tests under coverage; what it recorded is `data`."""
    data.parent.mkdir(parents=True, exist_ok=True)
    settings = data.parent / "settings-of-coverage"
    settings.write_text(SETTINGS.format(data=data))
    environment = {**os.environ, "COVERAGE_PROCESS_START": str(settings)}
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest"]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "--timeout=1200"]
    options += ["-p", "tests.mutants.covering_tests"]
    subprocess.run(
        [*command, *options, *tests],
        cwd=root,
        env=environment,
        check=False,
    )
    combine = [sys.executable, "-m", "coverage", "combine", f"--rcfile={settings}", "--append"]
    subprocess.run(combine, cwd=root, check=False)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record what is executed from now on under the test's name; pytest calls this."""
    import coverage

    recorder = coverage.Coverage.current()
    if recorder is not None:
        recorder.switch_context(nodeid)


def tests_by_line(data: Path) -> Mapping[tuple[str, int], Tests]:
    """Return the tests that execute a line, by file and line."""
    import coverage

    recorded = coverage.CoverageData(basename=str(data))
    recorded.read()
    tests: dict[tuple[str, int], set[str]] = defaultdict(set)
    for file in recorded.measured_files():
        for line, contexts in recorded.contexts_by_lineno(file).items():
            names = (context for context in contexts if context)
            tests[file, line].update(names)
    return {place: frozenset(names) for place, names in tests.items()}

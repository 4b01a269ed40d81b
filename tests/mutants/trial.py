"""One mutant is tried: in a copy of the repository, by a process forked from one that has torch
loaded already.
"""

from __future__ import annotations

import compileall
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.sites import Mutant

SHARED_LIBRARIES = ("torch", "transformers", "trl", "peft", "optuna", "hypothesis")
"""Loaded once for all mutants; nothing of autotune is."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    outcome: str  # "noticed", "survived", "too slow" or "not executed"
    test: str  # the first test that failed
    seconds: float


class FirstFailure:
    """Pytest plugin: the name of the first test that failed goes into a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self._file.exists():
            self._file.write_text(report.nodeid)


def copy_repository(root: Path, copy: Path) -> None:
    """Copy what git tracks, and compile it so that only a changed file is compiled again."""
    names = subprocess.run(
        ["git", "ls-files", "-z"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # deleted, not committed yet
            shutil.copy2(root / name, target)
    for environment in (".venv", ".venvs"):
        if (root / environment).exists():
            (copy / environment).symlink_to((root / environment).resolve())
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    for folder in ("autotune", "tests"):
        compileall.compile_dir(copy / folder, quiet=1, invalidation_mode=mode)


def enter(copy: Path) -> None:
    """Work in the copy from now on, with the shared libraries loaded."""
    os.chdir(copy)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path.insert(0, str(copy))
    for library in SHARED_LIBRARIES:
        with suppress(ImportError):
            __import__(library)


def try_mutant(
    mutant: Mutant,
    tests: Sequence[str],
    limit_s: float,
) -> Verdict:
    """Run tests until one notices the mutant. One that fails without it as well notices nothing."""
    begin = time.monotonic()
    remaining = list(tests)
    outcome = "survived" if remaining else "not executed"
    test = ""
    while remaining:
        outcome, test = _run_tests(mutant, remaining, limit_s)
        if outcome != "noticed" or _run_tests(None, [test], limit_s)[0] == "survived":
            break
        next_place = _place_in(remaining, test) + 1
        remaining = remaining[next_place:]
        outcome, test = "survived", ""
    return Verdict(
        outcome=outcome,
        test=test,
        seconds=round(time.monotonic() - begin, 1),
    )


def _place_in(tests: Sequence[str], test: str) -> int:
    """Return the last place of a test, or of a file whose collection failed."""
    places = (place for place, name in enumerate(tests) if name.startswith(test))
    return max(places, default=len(tests))


def _run_tests(
    mutant: Mutant | None,
    tests: Sequence[str],
    limit_s: float,
) -> tuple[str, str]:
    """Return the outcome and the test that failed first; the mutated file is whole afterwards."""
    failure = Path(f".first-failure-{os.getpid()}")
    failure.unlink(missing_ok=True)
    file = Path(mutant.file) if mutant else None
    text = file.read_text() if file else ""
    if mutant and file:
        file.write_text(mutant.applied_to(text))
    try:
        status = _fork(tests, failure, limit_s)
    finally:
        if file:
            file.write_text(text)
    if status is None:
        return "too slow", ""
    if failure.exists():
        return "noticed", failure.read_text()
    if status != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest ended with status {status} for {tests[:3]}.")
    return "survived", ""


def _fork(
    tests: Sequence[str],
    failure: Path,
    limit_s: float,
) -> int | None:
    """Return pytest's exit status; None if it did not end in time."""
    child = os.fork()
    if child == 0:
        os.setsid()
        _run_pytest(tests, failure)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run_pytest(tests: Sequence[str], failure: Path) -> None:
    """Run pytest in the forked process, and end it. `tests` is imported again, from the copy."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    status: int = pytest.ExitCode.INTERNAL_ERROR
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    try:
        with Path("/dev/null").open("w") as sink, redirect_stdout(sink), redirect_stderr(sink):
            status = pytest.main([*options, *tests], plugins=[FirstFailure(failure)])
    finally:
        os._exit(int(status))

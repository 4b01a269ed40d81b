"""One mutant is tried in a fork, in a copy of the repository, against tests one after the other."""

from __future__ import annotations

import compileall
import gc
import os
import py_compile
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants import patch
from tests.mutants.processes import in_fork
from tests.mutants.sites import Mutant

SHARED_LIBRARIES = ("torch", "transformers", "trl", "peft", "optuna", "hypothesis", "coverage")
"""Loaded once for all mutants; nothing of autotune is."""
OPTIONS = ["-q", "-s", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]

FAILED = 2  # exit status of a process whose tests failed; 1: the trial itself did
PASS_ALONE: set[str] = set()
"""Tests that passed on their own, without a mutant."""

RunTests = Callable[[Mutant | None, Sequence[str], Path], None]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    outcome: str  # "noticed", "survived", "too slow", "not executed" or "error"
    test: str  # the first test that failed
    seconds: float


class FirstFailure:
    """Pytest plugin: the name of the test that runs, and of the first that failed, go into a file.

    A process that dies leaves the name of the test that it ran.
    """

    def __init__(self, file: Path) -> None:
        self.failed = False
        self._file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file.write_text(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = True
            self._file.write_text(report.nodeid)


class FreshImports:
    """Runs tests in a process that has nothing of autotune loaded: for what an import executes."""

    def __call__(
        self,
        mutant: Mutant | None,
        tests: Sequence[str],
        note: Path,
    ) -> None:
        del mutant  # in the file that is imported
        forget_tests()
        first_failure = FirstFailure(note)
        status = pytest.main([*OPTIONS, "-x", *tests], plugins=[first_failure])
        os._exit(FAILED if status != pytest.ExitCode.OK else 0)


class LoadedTests:
    """Runs tests that are collected already, in a process that has the mutated module loaded."""

    def __init__(self, items: Mapping[str, pytest.Item], copy: Path) -> None:
        self._items = items
        self._functions = patch.loaded_functions(copy)
        self._compiled = patch.compiled_functions(copy)
        gc.freeze()  # a fork copies no page that the collector would write to

    def __call__(
        self,
        mutant: Mutant | None,
        tests: Sequence[str],
        note: Path,
    ) -> None:
        if mutant:
            patch.apply(mutant, _original(mutant).read_text(), self._functions)
            patch.forget_compiled(mutant.file, self._compiled)
        items = [self._items[test] for test in tests]
        first_failure = FirstFailure(note)
        items[0].config.pluginmanager.register(first_failure)
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if first_failure.failed:
                os._exit(FAILED)


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
    shutil.copytree(copy / "autotune", copy / ".originals" / "autotune")


def enter(copy: Path) -> None:
    """Work in the copy from now on, with the shared libraries loaded."""
    os.chdir(copy)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path.insert(0, str(copy))
    for library in SHARED_LIBRARIES:
        with suppress(ImportError):
            __import__(library)
    forget_tests()


def forget_tests() -> None:
    """Let `tests` be imported again, from the copy."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]


def try_mutant(
    mutant: Mutant,
    tests: Sequence[str],
    run_tests: RunTests,
    limit_s: float,
) -> Verdict:
    """Run tests until one notices the mutant. One that fails without it as well notices nothing."""
    begin = time.monotonic()
    remaining = list(tests)
    outcome = "survived" if remaining else "not executed"
    test = ""
    while remaining:
        outcome, test = _run(mutant, remaining, run_tests, limit_s)
        if outcome != "noticed" or _passes_alone(test, run_tests, limit_s):
            break
        next_place = _place_in(remaining, test) + 1
        remaining = remaining[next_place:]
        outcome, test = "survived", ""
    return Verdict(
        outcome=outcome,
        test=test,
        seconds=round(time.monotonic() - begin, 1),
    )


def _passes_alone(
    test: str,
    run_tests: RunTests,
    limit_s: float,
) -> bool:
    if test not in PASS_ALONE:
        if _run(None, [test], run_tests, limit_s)[0] != "survived":
            return False
        PASS_ALONE.add(test)
    return True


def _place_in(tests: Sequence[str], test: str) -> int:
    """Return the last place of a test, or of a file whose collection failed."""
    places = (place for place, name in enumerate(tests) if name.startswith(test))
    return max(places, default=len(tests))


def _run(
    mutant: Mutant | None,
    tests: Sequence[str],
    run_tests: RunTests,
    limit_s: float,
) -> tuple[str, str]:
    """Return the outcome and the test that failed first; the mutated file is whole afterwards."""
    note = Path(f".first-failure-{os.getpid()}").resolve()
    note.write_text("")
    if mutant:
        changed = mutant.applied_to(_original(mutant).read_text())
        Path(mutant.file).write_text(changed)  # for processes that a test starts
    try:
        status = in_fork(lambda: run_tests(mutant, tests, note), limit_s)
    finally:
        if mutant:
            shutil.copy2(_original(mutant), mutant.file)
    if status is None:
        return "too slow", note.read_text()
    if status == 0:
        return "survived", ""
    if status == 1:
        return "error", tests[0]
    return "noticed", note.read_text() or tests[0]


def _original(mutant: Mutant) -> Path:
    return Path(".originals") / mutant.file

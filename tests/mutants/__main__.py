"""Command line: choose mutants, try each, write the result."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import executed_lines, page
from tests.mutants.choice import tests_of
from tests.mutants.executed_lines import Executed
from tests.mutants.sites import Mutant, mutants_of, sample
from tests.mutants.trial import (
    OPTIONS,
    FreshImports,
    LoadedTests,
    RunTests,
    Verdict,
    copy_repository,
    enter,
    try_mutant,
)

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = (
    "autotune/estimate",
    "autotune/search",
    "autotune/probe",
    "autotune/preflight",
    "autotune/request",
    "autotune/frameworks/trl",
)
SHOWN = ("file", "line", "function", "kind", "before", "after")  # of a mutant, in its row
RESULT = ROOT / "benchmarks" / "results" / "mutants.json"


class Session:
    """Pytest plugin: instead of running the tests that were collected, do the work with them."""

    def __init__(self, work: Work) -> None:
        self._work = work

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._work.with_tests(session.items)
        return True


class Former:
    """The committed reading, which a later one goes on with: its mutants are judged again."""

    def __init__(self, file: Path | None) -> None:
        self.rows: dict[str, Mapping[str, Any]] = {}
        self.reading: Mapping[str, int] | None = None
        if file is not None:
            result = json.loads(file.read_text())
            self.rows = {row["key"]: row for row in result["mutants"]}
            self.reading = result["first_reading"]

    def test_of(self, key: str) -> str:
        """Return the test that noticed a mutant; "" where none did."""
        return str(self.rows.get(key, {}).get("test", ""))

    def first_verdict(self, key: str, outcome: str) -> dict[str, Any]:
        """Return the outcome at the first reading, as a part of a row; `further`: the first reading
        did not have the mutant, and no test had been added with it in mind.
        """
        row = self.rows.get(key)
        if row is None:
            return {"further": True, "first_outcome": outcome}
        first = {"first_outcome": row.get("first_outcome", row["outcome"])}
        return first | {"further": True} if row.get("further") else first


class Work:
    """What is left to do of a run: it ends when its time is up, and goes on when started again."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._lines = arguments.folder / "executed-lines.jsonl"
        share, shares = map(int, arguments.share.split("/"))
        self._verdicts = f"verdicts-{arguments.seed}-{arguments.reading}"
        self._log = arguments.folder / f"{self._verdicts}-{share}.jsonl"
        self._files = _files(arguments.only or ROOMS)
        self._deadline = time.monotonic() + arguments.stop_after

        mutants = [mutant for file in self._files for mutant in mutants_of(file, ROOT)]
        self.former = Former(RESULT if arguments.reading > 1 else None)
        keys = list(self.former.rows)
        self._chosen = sample(mutants, arguments.number, arguments.seed, keys)
        self._shared = slice(share - 1, None, shares)
        self.number_of_sites = len(mutants)

    def with_tests(self, items: Sequence[pytest.Item]) -> None:
        """Measure what the tests execute where that is not known, then try the mutants."""
        measured = executed_lines.measured_files(self._lines)
        for file, tests in list(_by_file(items).items())[self._shared]:
            if self._arguments.measured_only or self.is_late():
                break
            if file not in measured:
                print("measured:", file, flush=True)
                executed_lines.measure(tests, self._arguments.only or ROOMS, self._lines)
        if not self.is_late() and not self._arguments.measure_only:
            by_name = {item.nodeid: item for item in items}
            executed = executed_lines.read(self._lines, set(by_name))
            self.try_mutants(LoadedTests(by_name, Path.cwd()), executed, at_import=False)

    def is_left_to_fresh_imports(self) -> bool:
        return all(mutant.at_import for mutant in self._remaining())

    def try_fresh_imports(self) -> None:
        self.try_mutants(FreshImports(), executed_lines.read(self._lines), at_import=True)

    def try_mutants(
        self,
        run_tests: RunTests,
        executed: Executed,
        *,
        at_import: bool,
    ) -> None:
        for mutant in self._remaining():
            if self.is_late():
                return
            if mutant.at_import != at_import:
                continue
            budget_s = self._arguments.budget
            place = (mutant.file, mutant.line)
            if self._arguments.measured_only and place not in executed.tests_by_line:
                continue
            former_test = self.former.test_of(mutant.key)
            names = tests_of(mutant, executed, self._files, ROOT, budget_s, former_test)
            verdict = try_mutant(mutant, names, run_tests, 4 * budget_s + 30)
            self._note(mutant, verdict, len(names))

    def _remaining(self) -> Iterator[Mutant]:
        in_any_order = random.Random(self._arguments.seed).sample(self._chosen, len(self._chosen))
        verdicts = self.verdicts()
        for mutant in in_any_order[self._shared]:  # what is judged so far is a fair sample
            judged = verdicts.get(mutant.key)
            if judged is None or self._is_again(judged):
                yield mutant

    def _is_again(self, judged: Mapping[str, Any]) -> bool:
        """Return whether a survivor has not been tried yet with this budget."""
        if judged["outcome"] not in ("survived", "not executed", "error"):
            return False
        return bool(judged["budget_s"] < self._arguments.budget)

    def _note(
        self,
        mutant: Mutant,
        verdict: Verdict,
        tests: int,
    ) -> None:
        described = dataclasses.asdict(mutant)
        row = {
            "key": mutant.key,
            **{name: described[name] for name in SHOWN},
            **dataclasses.asdict(verdict),
            "tests": tests,
            "budget_s": self._arguments.budget,
            "reading": self._arguments.reading,
        }
        with self._log.open("a") as log:
            log.write(json.dumps(row) + "\n")
        place = f"{mutant.file}:{mutant.line} {mutant.function}"
        print(f"{verdict.outcome} in {verdict.seconds} s: {place}", flush=True)
        print(f"    {mutant.before!r} -> {mutant.after!r} {verdict.test}", flush=True)

    def verdicts(self) -> dict[str, dict[str, Any]]:
        """Return the last row of each mutant by its key."""
        verdicts = {}
        for log in sorted(self._arguments.folder.glob(f"{self._verdicts}-*.jsonl")):
            for row in map(json.loads, log.read_text().splitlines()):
                verdicts[row["key"]] = row
        return verdicts

    def judged(self) -> list[dict[str, Any]]:
        judged = []
        verdicts = self.verdicts()
        for mutant in self._chosen:
            row = verdicts.get(mutant.key)
            if row is not None:
                judged.append(row | self.former.first_verdict(mutant.key, row["outcome"]))
        return judged

    def is_late(self) -> bool:
        return time.monotonic() > self._deadline


def main() -> None:
    arguments = _arguments()
    work = Work(arguments)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        copy_repository(ROOT, copy)
        enter(copy)
        leave_caches_alone(copy)
        options = [*OPTIONS, f"--basetemp={copy / '.temporary'}", *arguments.tests]
        if not arguments.measure_only and work.is_left_to_fresh_imports():
            work.try_fresh_imports()
        else:
            pytest.main(options, plugins=[Session(work)])
    judged = work.judged()
    print(f"{len(judged)} of {arguments.number} mutants are judged")
    if judged and not arguments.measure_only:
        page.write(
            judged,
            work.former.reading,
            number=arguments.number,
            sites=work.number_of_sites,
            seed=arguments.seed,
            budget_s=arguments.budget,
            out=arguments.out,
        )


def leave_caches_alone(folder: Path) -> None:
    """Work on links to the user's traces and step models: what a mutant writes is wrong, and would
    answer later predictions.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    links = folder / ".caches"
    if (caches / "autotune").is_dir():
        shutil.copytree(caches / "autotune", links / "autotune", copy_function=_link)
    os.environ["XDG_CACHE_HOME"] = str(links)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="files or folders, instead of the usual rooms")
    parser.add_argument(
        "--tests",
        nargs="+",
        default=["tests"],
        help="which tests may notice",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(".mutants"),
        help="resumed from here",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=15.0,
        help="seconds of tests per mutant",
    )
    parser.add_argument(
        "--stop-after",
        type=float,
        default=float("inf"),
        help="seconds",
    )
    parser.add_argument("--measure-only", action="store_true")
    parser.add_argument("--measured-only", action="store_true", help="measure no further test")
    parser.add_argument("--share", default="1/1", help="1/2 and 2/2: two runs at the same time")
    parser.add_argument(
        "--reading",
        type=int,
        default=1,
        help="2: the mutants of the committed result again, after tests were added",
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.resolve()
    arguments.out = arguments.out.resolve()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    return arguments


def _files(places: Iterable[str]) -> list[Path]:
    files: list[Path] = []
    for place in places:
        path = ROOT / place
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return files


def _by_file(items: Sequence[pytest.Item]) -> Mapping[str, list[pytest.Item]]:
    by_file: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_file[item.nodeid.partition("::")[0]].append(item)
    return by_file


if __name__ == "__main__":
    main()

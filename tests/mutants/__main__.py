"""Command line: choose mutants, try each, write the result."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import yaml

from tests.mutants.covering_tests import measure, tests_by_line
from tests.mutants.sites import Mutant, mutants_of, sample
from tests.mutants.trial import Verdict, copy_repository, enter, try_mutant

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = (
    "autotune/estimate",
    "autotune/search",
    "autotune/probe",
    "autotune/preflight",
    "autotune/request",
    "autotune/frameworks/trl",
)
RESULT = ROOT / "benchmarks" / "results" / "mutants.json"
REASONS = Path(__file__).with_name("survivors.yaml")
BAR = 0.85
MAX_TESTS = 400
LIMIT_S = 240.0


def main() -> None:
    arguments = _arguments()
    files = _files(arguments.only or ROOMS)
    data = Path(arguments.coverage).resolve()
    if not data.exists():
        measure(ROOT, data, arguments.tests)
    tests = tests_by_line(data)
    mutants = [mutant for file in files for mutant in mutants_of(file, ROOT)]
    chosen = sample(mutants, arguments.number, arguments.seed)
    finished = _finished(arguments.log)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_repository(ROOT, copy)
        enter(copy)
        for number, mutant in enumerate(chosen, 1):
            if _key(mutant) in finished:
                continue
            names = _tests_of(mutant, tests)
            verdict = try_mutant(mutant, names, LIMIT_S)
            row = _row(mutant, verdict, len(names))
            finished[_key(mutant)] = row
            with arguments.log.open("a") as log:
                log.write(json.dumps(row) + "\n")
            place = f"{mutant.file}:{mutant.line} {mutant.function}"
            print(f"{number}/{len(chosen)} {verdict.outcome}: {place}", flush=True)
            print(f"    {mutant.before!r} -> {mutant.after!r} {verdict.test}", flush=True)
    _write([finished[_key(mutant)] for mutant in chosen], arguments)


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
    parser.add_argument("--coverage", default=".mutants/coverage", help="kept between calls")
    parser.add_argument(
        "--log",
        type=Path,
        default=Path(".mutants/log.jsonl"),
        help="resumed",
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    arguments.log = arguments.log.resolve()
    arguments.out = arguments.out.resolve()
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    return arguments


def _files(places: Iterable[str]) -> list[Path]:
    files: list[Path] = []
    for place in places:
        path = ROOT / place
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return files


def _tests_of(mutant: Mutant, tests: Mapping[tuple[str, int], frozenset[str]]) -> list[str]:
    """Return the tests that execute the mutant's line; of many, the same number of each file.

    Those of the room itself come first: they are written to notice. A line outside of functions is
    executed by an import: every test of the file may notice.
    """
    names: set[str] = set()
    for (file, line), executing in tests.items():
        if file == mutant.file and (mutant.at_import or line == mutant.line):
            names |= executing
    by_file: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        by_file[name.partition("::")[0]].append(name)
    room = mutant.file.split("/")[1]
    files = sorted(by_file, key=lambda file: (f"tests/{room}/" not in file, file))
    share = max(1, MAX_TESTS // max(1, len(files)))
    chosen: list[str] = []
    for file in files:
        chosen += by_file[file][:share]
    return chosen[:MAX_TESTS]


def _key(mutant: Mutant) -> str:
    return f"{mutant.file}:{mutant.function}: {mutant.before} -> {mutant.after} @{mutant.start}"


def _row(
    mutant: Mutant,
    verdict: Verdict,
    tests: int,
) -> dict[str, object]:
    described = dataclasses.asdict(mutant)
    return {
        "key": _key(mutant),
        **{name: described[name] for name in ("file", "line", "function", "kind")},
        "before": mutant.before,
        "after": mutant.after,
        **dataclasses.asdict(verdict),
        "tests": tests,
    }


def _finished(log: Path) -> dict[str, dict[str, object]]:
    if not log.exists():
        return {}
    rows = map(json.loads, log.read_text().splitlines())
    return {row["key"]: row for row in rows}


def _write(rows: Sequence[Mapping[str, object]], arguments: argparse.Namespace) -> None:
    reasons = yaml.safe_load(REASONS.read_text()) or {}
    outcomes = Counter(row["outcome"] for row in rows)
    noticed = outcomes["noticed"] + outcomes["too slow"]
    survivors = []
    for row in rows:
        if row["outcome"] in ("survived", "not executed"):
            place = f"{row['file']}:{row['function']}: {row['before']} -> {row['after']}"
            survivors.append({**row, "reason": reasons.get(place, "")})
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "seed": arguments.seed,
        "rooms": arguments.only or ROOMS,
        "mutants": len(rows),
        "outcomes": dict(outcomes),
        "noticed_share": round(noticed / max(1, len(rows)), 3),
        "bar": BAR,
        "survivors": survivors,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{noticed} of {len(rows)} noticed, {len(survivors)} survived: {arguments.out}")


if __name__ == "__main__":
    main()

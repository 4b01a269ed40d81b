"""Predicted memory and speed, compared with public measurements: every chosen row of
foresight-rows.json, under the library versions it names.

make bench-foresight

No GPU, no weights, no network: the training step of each row is traced on tensors without memory,
with the installed code of the versions that the row was measured with where that can be installed,
and compared by kind of peak. Writes results/foresight.json and results/foresight.md; `--set second`
reads the models that were added later and writes results/foresight-second.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import foresight_calculators as calculators
import foresight_express as express
import foresight_predict as predicted
import foresight_report as report
import foresight_verdicts as verdicts
import machine
import row_sets

HERE = Path(__file__).resolve().parent
ROWS = HERE / "foresight-rows.json"
RESULTS = HERE / "results"
ENVIRONMENTS = HERE.parent / ".venvs"
CURRENT = "current"
BESIDE = "liger"
"""Overlay with packages that rows of current versions need and the environment lacks."""

PARALLEL = 2
TRACE_SECONDS = 600.0
"""Wall seconds per specification. On a shared machine the longest takes fifty times as long as
alone.
"""

Task = tuple[str, Path, Mapping[str, Any]]
"""Environment's name, its path, and the specifications that one process traces in it."""


def main() -> int:
    options = _arguments()
    choice = json.loads(ROWS.read_text())
    rows = row_sets.chosen(choice["rows"], options.set)
    chosen = [row for row in rows if not options.ids or row["id"] in options.ids]
    began = time.monotonic()
    cases, verdict_cases = [], []
    for row in chosen:
        if row["class"] == "fms":
            cases.append(express.fms(row))
        elif row["class"] == "verdict":
            verdict_cases.append(verdicts.express(row))
    followed = list(cases)
    for verdict_case in verdict_cases:
        followed.extend(verdict_case.cases)
    traces = follow_all(followed, options.environments, options.keep)
    ended, measured = [], []
    for case in cases:
        if "outcome" in case.row["measured"]:
            ended.append(case)
        else:
            measured.append(case)
    compared = []
    for case in measured:
        compared.append(
            calculators.with_estimates(
                case, predicted.compare(case, traces.get(case.key), _beside(choice, case))
            )
        )
    decided = [verdicts.decide(case, traces) for case in verdict_cases]
    decided += [predicted.decide(case, traces.get(case.key)) for case in ended]
    reused = sum(answer.get("kept", False) for answer in traces.values())
    facts = {
        **machine.facts(report.versions(traces.values())),
        "seconds": round(time.monotonic() - began),
        "traces": len(traces),
        "kept": reused,
    }
    document = report.document(compared, decided, facts)
    print(report.readable(document))
    if not options.ids:
        row_sets.write(document, report.readable(document), options.out, "foresight", options.set)
    return 0 if document["bars_met"] else 1


def _beside(choice: Mapping[str, Any], case: Any) -> float:
    """Return the known MiB outside torch of the machine of this row's environment."""
    return float(choice["environments"].get(case.row["environment"], {}).get("shown_beside_mib", 0))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=ENVIRONMENTS,
        help="folder with foresight-tf-4.48 and its like",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--keep",
        type=Path,
        help=(
            "folder of traces: what is there is not followed again, what is new is put there at"
            " once"
        ),
    )
    row_sets.add_option(parser)
    parser.add_argument("ids", nargs="*", help="only these rows, and nothing is written")
    return parser.parse_args()


def follow_all(
    cases: Iterable[Any],
    environments: Path,
    keep: Path | None,
) -> dict[str, Mapping[str, Any]]:
    """Trace every specification once, in the environment of its rows. A missing environment is
    reported, not replaced."""
    specification_by_key: dict[str, dict[str, Any]] = {}
    answers: dict[str, Mapping[str, Any]] = {}
    for case in cases:
        stored = _answer(keep, case.key) if keep else None
        if stored is not None and "trace" in stored:
            answers[case.key] = {**stored, "kept": True}
        else:
            specification_by_key.setdefault(case.row["environment"], {})[case.key] = (
                case.specification
            )
    with tempfile.TemporaryDirectory() as folder:
        answered = keep or Path(folder)
        answered.mkdir(parents=True, exist_ok=True)
        jobs: list[Task] = []
        for name, environment_specifications in specification_by_key.items():
            overlay = environments / f"foresight-{BESIDE if name == CURRENT else name}"
            if name != CURRENT and not overlay.is_dir():
                for key in environment_specifications:
                    answers[key] = {"error": f"no environment {overlay}: make {overlay.name}"}
                continue
            jobs += _split(name, overlay, environment_specifications)
        _run(jobs, Path(folder), answered)
        for _, _, specifications in jobs:
            for key in specifications:
                answers[key] = _answer(answered, key) or {
                    "error": "the tracing process gave no answer"
                }
    return answers


def _answer(folder: Path, key: str) -> dict[str, Any] | None:
    path = folder / f"{key}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _split(
    name: str,
    overlay: Path,
    specifications: Mapping[str, Any],
) -> list[Task]:
    """Return one task per available core."""
    keys = list(specifications)
    parts = [{key: specifications[key] for key in keys[part::PARALLEL]} for part in range(PARALLEL)]
    return [(name, overlay, specifications) for specifications in parts if specifications]


def _run(
    jobs: list[Task],
    folder: Path,
    answered: Path,
) -> None:
    """Run a few tasks at a time; a task that hangs is ended, and its rows state that."""
    waiting = list(enumerate(jobs))
    running: list[tuple[subprocess.Popen[bytes], float]] = []
    while waiting or running:
        while waiting and len(running) < PARALLEL:
            number, task = waiting.pop(0)
            running.append(
                _start(*task, request=folder / f"specifications-{number}.json", answered=answered)
            )
        running = [(process, until) for process, until in running if process.poll() is None]
        for process, until in running:
            if time.monotonic() > until:
                process.kill()
        time.sleep(0.2)


def _start(
    name: str,
    overlay: Path,
    specifications: Mapping[str, Any],
    *,
    request: Path,
    answered: Path,
) -> tuple[subprocess.Popen[bytes], float]:
    request.write_text(json.dumps(specifications))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if overlay.is_dir():
        environment["PYTHONPATH"] = str(overlay.resolve())
    print(f"following {len(specifications)} steps under {name}", file=sys.stderr)
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(HERE / "foresight_tracer.py"),
        str(request),
        str(answered),
    ]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return process, time.monotonic() + 60 + TRACE_SECONDS * len(specifications)


if __name__ == "__main__":
    raise SystemExit(main())

"""Predicted against publicly measured: every chosen row of foresight-rows.json, under the library versions it names.

    make bench-foresight

No GPU, no weights, no network: each row's training step is followed on tensors without memory, by the code that the row was
measured with where that can be installed, and compared by kind of peak. Writes results/foresight.json and results/foresight.md.
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

import foresight_express as express
import foresight_predict as predicted
import foresight_report as report
import foresight_verdicts as verdicts
import machine

HERE = Path(__file__).resolve().parent
ROWS = HERE / "foresight-rows.json"
RESULTS = HERE / "results"
ENVIRONMENTS = HERE.parent / ".venvs"
PARALLEL = 2
TRACE_SECONDS = 120.0
"""Per specification; more than ten times what the longest takes."""


def main() -> int:
    asked = _arguments()
    choice = json.loads(ROWS.read_text())
    rows = choice["rows"]
    chosen = [row for row in rows if not asked.ids or row["id"] in asked.ids]
    began = time.monotonic()
    cases = [express.fms(row) for row in chosen if row["class"] == "fms"]
    verdict_cases = [verdicts.express(row) for row in chosen if row["class"] == "verdict"]
    traces = follow_all([*cases, *(one for several in verdict_cases for one in several.cases)], asked.environments, asked.keep)
    compared = [predicted.compare(case, traces.get(case.key), _beside(choice, case)) for case in cases]
    decided = [verdicts.decide(case, traces) for case in verdict_cases]
    kept = sum(answer.get("kept", False) for answer in traces.values())
    facts = {
        **machine.facts(report.versions(traces.values())),
        "seconds": round(time.monotonic() - began),
        "traces": len(traces),
        "kept": kept,
    }
    document = report.document(compared, decided, facts)
    print(report.readable(document))
    if not asked.ids:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "foresight.json").write_text(json.dumps(document, indent=1) + "\n")
        (asked.out / "foresight.md").write_text(report.readable(document))
    return 0 if document["bars_met"] else 1


def _beside(choice: Mapping[str, Any], case: Any) -> float:
    """MiB that are known of the machine of this row's environment."""
    return float(choice["environments"].get(case.row["environment"], {}).get("shown_beside_mib", 0))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="folder with foresight-tf-4.48 and its like")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--keep", type=Path, help="folder of traces: what is there is not followed again, what is new is put there"
    )
    parser.add_argument("ids", nargs="*", help="only these rows, and nothing is written")
    return parser.parse_args()


def follow_all(cases: Iterable[Any], environments: Path, keep: Path | None) -> dict[str, Mapping[str, Any]]:
    """Every specification once, in the environment of its rows. An environment that is not there is said, not replaced."""
    wanted: dict[str, dict[str, Any]] = {}
    answers: dict[str, Mapping[str, Any]] = {}
    for case in cases:
        kept = keep / f"{case.key}.json" if keep else None
        if kept is not None and kept.is_file():
            answers[case.key] = {**json.loads(kept.read_text()), "kept": True}
        else:
            wanted.setdefault(case.row["environment"], {})[case.key] = case.specification
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for name, specifications in wanted.items():
            overlay = environments / f"foresight-{name}"
            if name != "current" and not overlay.is_dir():
                answers.update({key: {"error": f"no environment {overlay}: make {overlay.name}"} for key in specifications})
                continue
            jobs += _split(name, overlay, specifications, Path(folder))
        _run(jobs)
        for _, _, specifications, answered in jobs:
            for key in specifications:
                found = answered / f"{key}.json"
                answers[key] = (
                    json.loads(found.read_text()) if found.is_file() else {"error": "the tracing process gave no answer"}
                )
                if keep and "trace" in answers[key]:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / found.name).write_text(json.dumps(answers[key]))
    return answers


def _split(name: str, overlay: Path, specifications: Mapping[str, Any], folder: Path) -> list[tuple[str, Path, Any, Path]]:
    """As many processes as there are cores to share."""
    keys = list(specifications)
    jobs = []
    for part in range(PARALLEL):
        own = {key: specifications[key] for key in keys[part::PARALLEL]}
        if own:
            answered = folder / f"{name}-{part}"
            answered.mkdir()
            jobs.append((name, overlay, own, answered))
    return jobs


def _run(jobs: list[tuple[str, Path, Any, Path]]) -> None:
    """A few at a time; what hangs is ended, and its rows say so."""
    waiting, running = list(jobs), []
    while waiting or running:
        while waiting and len(running) < PARALLEL:
            running.append(_start(*waiting.pop(0)))
        running = [(process, until) for process, until in running if process.poll() is None]
        for process, until in running:
            if time.monotonic() > until:
                process.kill()
        time.sleep(0.2)


def _start(name: str, overlay: Path, specifications: Mapping[str, Any], answered: Path) -> tuple[subprocess.Popen[bytes], float]:
    asked = answered / "specifications.json"
    asked.write_text(json.dumps(specifications))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if name != "current":
        environment["PYTHONPATH"] = str(overlay.resolve())
    print(f"following {len(specifications)} steps under {name}", file=sys.stderr)
    command = [sys.executable, "-W", "ignore", str(HERE / "foresight_tracer.py"), str(asked), str(answered)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return process, time.monotonic() + 60 + TRACE_SECONDS * len(specifications)


if __name__ == "__main__":
    raise SystemExit(main())

"""Split and asynchronous runs beside colocated ones: predicted, compared with public reports.

python benchmarks/split.py
    # every report of split_reports.yaml; writes results/split.{json,md}
python benchmarks/split.py REPORT ...  # some of them; the others keep their rows

Each report states the time of both runs. Both are predicted from their settings, without
calibration, at the lengths that the report states or, marked, at assumed ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import machine
import yaml

from autotune.core.prediction import Prediction
from autotune.prediction.service import open_prediction_service
from autotune.request.flags import flags_of
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import parse_request

HERE = Path(__file__).resolve().parent
REPORTS, RESULTS = HERE / "split_reports.yaml", HERE / "results"
EQUAL = 0.05
"""Ratio within which neither of two runs is the better one."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="*", metavar="REPORT")
    chosen = parser.parse_args().reports
    reports = yaml.safe_load(REPORTS.read_text())["reports"]
    path = RESULTS / "split.json"
    rows = {row["id"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    for report in reports:
        if not chosen or report["id"] in chosen:
            rows[report["id"]] = compared(report)
            print(_line(rows[report["id"]]), flush=True)
            _write([report["id"] for report in reports], rows)
    return 0


def _write(names: Sequence[str], rows: Mapping[str, Mapping[str, Any]]) -> None:
    ordered, not_run = [], []
    for name in names:
        if name in rows:
            ordered.append(rows[name])
        else:
            not_run.append(name)
    document = {
        "ran_on": machine.facts({}),
        "not_run": not_run,
        "rows": ordered,
    }
    (RESULTS / "split.json").write_text(json.dumps(document, indent=1) + "\n")
    (RESULTS / "split.md").write_text(readable(document))


def compared(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report's row: speeds of the split run divided by those of the colocated one."""
    facts = {}
    for name in ("id", "url", "gpus", "what", "lengths", "assumed", "reported"):
        facts[name] = report[name]
    predicted = {}
    for mode in ("colocated", "split"):
        predicted[mode] = _predicted({**report["run"], "gpus": report["gpus"]}, report, mode)
    ratio = predicted["split"]["tokens_per_second"] / predicted["colocated"]["tokens_per_second"]
    right = side(ratio) == side(report["reported"])
    return {**facts, "predicted": round(ratio, 3), "right_side": right, "runs": predicted}


def side(ratio: float) -> int:
    """1: the split run is better; -1: the colocated one; 0: neither."""
    return 0 if abs(ratio - 1) <= EQUAL else 1 if ratio > 1 else -1


def _predicted(
    run: Mapping[str, Any],
    report: Mapping[str, Any],
    mode: str,
) -> dict[str, Any]:
    settings = {**report["settings"], **report[mode]}
    options = {
        "lengths": report["lengths"],
        "set": [f"{name}={value}" for name, value in settings.items()],
    }
    request = parse_request(flags_of({**run, **options}).replace(mode="predict"))
    with contextlib.closing(open_prediction_service(request.job, request.trainer)) as service:
        return _figures(service.predict(candidate_of_job(request)))


def _figures(prediction: Prediction) -> dict[str, Any]:
    rate = prediction.ranking_rate
    assert rate is not None
    seconds = prediction.seconds_at_lengths or {}
    document: dict[str, Any] = {
        "tokens_per_second": round(rate.value, 1),
        "low": round(rate.low, 1),
        "high": round(rate.high, 1),
        "seconds": {name: round(phase_seconds.value, 1) for name, phase_seconds in seconds.items()},
    }
    if prediction.pipeline:
        document["pipeline"] = {
            name: round(getattr(prediction.pipeline, name).value, 1)
            for name in ("generation", "training")
        }
    return document


def readable(document: Mapping[str, Any]) -> str:
    ran, rows = document["ran_on"], document["rows"]
    right = sum(row["right_side"] for row in rows)
    lines = [
        "# Split and asynchronous runs, predicted and reported",
        "",
        (
            f"Predicted without calibration, {ran.get('date')}, commit {ran.get('commit')},"
            f" {ran.get('cpu')}."
        ),
        (
            "Speed of the split run over that of the colocated one on as many GPUs; within 5% of 1"
            " neither is better."
        ),
        f"The better of the two is named in {right} of {len(rows)} reports.",
        *(
            [f"Listed and not predicted: {', '.join(document['not_run'])}."]
            if document["not_run"]
            else []
        ),
        "",
        (
            "| report | GPUs | compared | lengths | reported | predicted | right side | predicted"
            " seconds, colocated | split |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in rows),
        "",
        "Not stated by the report and assumed:",
        "",
        *(f"- {row['id']}: {row['assumed']}" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _seconds_text(seconds_by_name: Mapping[str, float]) -> str:
    parts = []
    for name, seconds in seconds_by_name.items():
        if seconds >= 0.1:
            parts.append(f"{name} {seconds}")
    return ", ".join(parts)


def _line(row: Mapping[str, Any]) -> str:
    colocated, split = row["runs"]["colocated"], row["runs"]["split"]
    parts = _seconds_text(colocated["seconds"])
    apart = _seconds_text(split.get("pipeline") or split["seconds"])
    return (
        f"| [{row['id']}]({row['url']}) | {row['gpus']} | {row['what']} | {row['lengths']} |"
        f" {row['reported']:.2f} | {row['predicted']:.2f} | {'yes' if row['right_side'] else 'no'}"
        f" | {parts} | {apart} |"
    )


if __name__ == "__main__":
    raise SystemExit(main())

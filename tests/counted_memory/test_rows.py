"""The rows of the public measurements: each record once, each exclusion with its reason, each
chosen row expressible.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import foresight_calculators as calculators  # noqa: E402
import foresight_express as express  # noqa: E402
import foresight_report as report  # noqa: E402
import foresight_verdicts as verdicts  # noqa: E402
import foresight_verl  # noqa: E402

CHOICE: dict[str, Any] = json.loads((BENCHMARKS / "foresight-rows.json").read_text())
ROWS: list[dict[str, Any]] = CHOICE["rows"]
FMS = [row for row in ROWS if row["class"] == "fms"]
VERDICTS = [row for row in ROWS if row["class"] == "verdict"]


def test_every_record_is_chosen_or_excluded_once() -> None:
    ids = [row["id"] for row in ROWS if row.get("set", "first") == "first"]
    for exclusion in CHOICE["excluded"]:
        ids += exclusion["ids"]
        assert len(exclusion["reason"]) > 10
    assert len(ids) == len(set(ids)) == 725
    assert len({row["id"] for row in ROWS}) == len(ROWS)


def test_enough_rows_of_both_kinds_are_chosen() -> None:
    assert len(FMS) >= 60
    assert {row["gpus"] for row in FMS} >= {1, 2, 4}
    assert "oom" in {row["outcome"] for row in VERDICTS}


def test_a_chosen_row_has_a_public_page_and_its_environment_is_pinned() -> None:
    for row in ROWS:
        assert row["url"].startswith("https://github.com/")
        pinned = BENCHMARKS.parent / ".ci" / "constraints" / f"foresight-{row['environment']}.txt"
        assert row["environment"] == "current" or pinned.is_file()


def test_rows_with_different_steps_request_different_traces() -> None:
    specifications: dict[str, Any] = {}
    environments, batches = set(), set()
    for row in FMS:
        case = express.fms(row)
        specifications.setdefault(case.key, case.specification)
        assert specifications[case.key] == case.specification
        environments.add((case.key, row["environment"]))
        batches.add((row["model"], row["tuning"], row["micro_batch"]))
    assert len(environments) == len(specifications), (
        "the same step under other versions is another trace"
    )
    assert len(specifications) >= len(batches)


VERL = [row for row in VERDICTS if "verl" in row["framework"].lower()]
OTHERS = [row for row in VERDICTS if row not in VERL]


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: str(row["id"]))
def test_a_verdict_row_is_expressed_or_lists_the_missing_facts(row: dict[str, Any]) -> None:
    case = verdicts.express(row)
    assert case.ways or case.open


@pytest.mark.parametrize("row", VERL, ids=lambda row: str(row["id"]))
def test_a_verl_row_is_a_request_of_the_product(row: dict[str, Any]) -> None:
    request = foresight_verl.request_of(row, verdicts.MODELS.get(row["model"], row["model"]))
    assert (request.job.task.hardware.count, request.trainer.name) == (row["gpus"], "verl")


def test_a_row_without_a_trace_counts_against_the_bar() -> None:
    right = {
        "id": "a",
        "class": "x",
        "gpus": 1,
        "torch_max_allocated": {"error": 0.0},
        "nvidia_smi_used": {"error": 0.0, "predicted": 1, "measured": 1},
    }
    lost = {"id": "b", "class": "x", "gpus": 1, "error": "no environment"}
    bars = report.document([right, lost], [], {})["bars"]
    assert not bars["torch_max_allocated"]["met"]
    assert report.document([right], [], {})["bars"]["torch_max_allocated"]["met"]


def test_an_out_of_memory_called_a_fit_fails_the_bar() -> None:
    bad = [{"id": "v", "outcome": "oom", "verdict": True}]
    assert not report.document([], bad, {})["verdicts"]["met"]
    still_open = [{"id": "v", "outcome": "oom", "verdict": None}]
    assert report.document([], still_open, {})["verdicts"]["met"]


def test_calculators_are_applied_as_far_as_they_go() -> None:
    full, lora = mistral_row("full"), mistral_row("lora")
    of_full = calculators.estimates(express.fms(full))
    of_lora = calculators.estimates(express.fms(lora))
    assert of_full["accelerate"] == of_lora["accelerate"], "the command has no adapters"
    states = 16 * 7_241_732_096  # gradients and Adam's states of Mistral-7B's parameters
    saved = of_full["closed formula"] - of_lora["closed formula"]
    tokens = full["length"] - lora["length"]
    assert saved == pytest.approx(states + 34 * tokens * 4 * 4096 * 32, rel=0.01)


def mistral_row(tuning: str) -> dict[str, Any]:
    """Return the first row of Mistral on one GPU at a micro-batch of 4."""
    for row in FMS:
        mistral = row["model"].startswith("mistralai")
        if mistral and (row["tuning"], row["gpus"], row["micro_batch"]) == (tuning, 1, 4):
            return row
    raise AssertionError(f"no row with {tuning} tuning")

"""Each file of measurements is judged by what it says it measured, not by a count of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.core.units import GIB
from tests.gpu.committed import complaints

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
sys.path.insert(0, str(RESULTS.parent))

from first_light_page import (  # noqa: E402
    ALLOCATED,
    DEVICE,
    KV,
    differences,
    disagreements,
    read_results,
)

START = {"kind": "start", "basis": "measured", "machine": {"date": "2026-11-26"}}


def point(outcome: str = "ok", basis: str = "measured") -> dict[str, Any]:
    return {"kind": "point", "key": "k1", "basis": basis, "outcome": outcome}


def step(name: str) -> dict[str, Any]:
    return {"kind": "step", "name": name, "basis": "measured", "outcome": "ok"}


def test_a_small_file_is_good() -> None:
    assert complaints([START, point(), step("sft")]) == []


def test_a_file_without_points_is_good_if_no_step_had_any() -> None:
    assert complaints([START, step("identity")]) == []


def test_a_step_that_ended_well_has_points() -> None:
    assert len(complaints([START, step("sft")])) == 1
    assert len(complaints([START, point("failed to start"), step("sft")])) == 1


def test_a_file_has_a_machine_and_a_date() -> None:
    assert len(complaints([point()])) == 1


def test_emulated_figures_are_not_measured() -> None:
    assert len(complaints([START, point(basis="emulated")])) == 1


@pytest.mark.parametrize("card", ["H100", "A100-40G"])
def test_rehearsals_agree_with_the_predictions(card: str) -> None:
    """Every point whose step ended: torch's peak within 1 %, device memory within 3 %, the cache
    within 0.5 %.
    """
    results = read_results(RESULTS / "first-light-emulated" / card)
    assert disagreements(results) == []
    every = differences(results)
    assert [difference.point for difference in every if difference.is_large] == []
    figures = [difference.figure for difference in every]
    assert figures.count(ALLOCATED) == figures.count(DEVICE) >= 24
    assert figures.count(KV) == 8


@pytest.mark.parametrize("card", ["H100", "A100-40G"])
def test_a_share_of_a_limit_is_the_predicted_one_in_the_probe(card: str) -> None:
    """Limits of 16, 24 and 40 GiB and none."""
    results = read_results(RESULTS / "first-light-emulated" / card)
    limits = set()
    for key, line in results.points("emulated").items():
        if line["engine_share"] is None:
            continue
        limits.add(" GiB" in line["setup"] and line["setup"].split(" GiB")[0].split()[-1])
        assert line["engine_share"] == results.predicted[key]["engine_share"]
    assert limits == {"16", "24", "40", False}


@pytest.mark.parametrize("card", ["H100", "A100-40G"])
def test_a_rehearsal_is_one_program_whose_steps_ended_well(card: str) -> None:
    results = read_results(RESULTS / "first-light-emulated" / card)
    kinds = [line["kind"] for line in results.lines("emulated")]
    assert kinds.count("start") == 1
    steps = results.latest("emulated", "step")
    assert len(steps) == 13
    assert {line["outcome"] for line in steps.values()} == {"ok"}


@pytest.mark.parametrize("card", ["H100", "A100-40G"])
def test_the_search_under_a_limit_recommends_an_engine_that_it_confirmed(card: str) -> None:
    results = read_results(RESULTS / "first-light-emulated" / card)
    answer = results.latest("emulated", "search")["search"]["answer"]
    recommendation = answer["recommendation"]
    assert recommendation["settings"]["use_vllm"] is True
    assert recommendation["certificate"]["complete"] is True
    assert recommendation["peak_memory_bytes"] < 40 * GIB


def test_predictions_after_mending_agree_in_every_point() -> None:
    """Second readings on a real card: no point misses 1 % and 3 %."""
    card = RESULTS / "first-light" / "H200"
    results = read_results(card)
    text = (card / "predicted-after-mending.json").read_text()
    results.predicted.update(json.loads(text))
    assert disagreements(results) == []
    memory = [
        difference
        for difference in differences(results)
        if difference.figure in (ALLOCATED, DEVICE)
    ]
    assert len(memory) == 2 * 14
    assert not any(difference.is_large for difference in memory)


def test_verdicts_of_the_measured_card_agree_with_the_predictions_made_beforehand() -> None:
    """One of the points of the H200 runs out of memory in its first forward pass."""
    results = read_results(RESULTS / "first-light" / "H200")
    assert disagreements(results) == []
    outcomes = [line["outcome"] for line in results.measured if line["kind"] == "point"]
    assert outcomes.count("ok") == 14
    assert outcomes.count("oom_forward") == 1

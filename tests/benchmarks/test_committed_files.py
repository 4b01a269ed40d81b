"""Each file of measurements is judged by what it says it measured, not by a count of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.committed import complaints

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
sys.path.insert(0, str(RESULTS.parent))

from first_light_page import (  # noqa: E402
    ALLOCATED,
    DEVICE,
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


SMALL_ENGINES = 0.04
"""Bar of the points with an engine of half a billion parameters: 1 % of their peak is 60 MiB."""


MISSED = {
    "H100": [
        (DEVICE, "grpo Qwen2.5-7B qlora 24 GiB, micro-batch 4, 512 + 512 tokens, checkpointing")
    ],
    "A100-40G": [],
}
"""Points that miss the bar, as docs/gpu-benchmarks.md says: torch's cache is predicted too large
there, 10.0 GiB (9.0 to 12.0) where 9.4 were emulated. What torch allocates agrees.
"""


@pytest.mark.parametrize("card", ["H100", "A100-40G"])
def test_rehearsals_agree_with_the_predictions_made_beforehand(card: str) -> None:
    """Every point whose step ended: torch's peak within 1 %, device memory within 3 %, but for
    those that are listed.
    """
    folder = RESULTS / "first-light-emulated" / card
    results = read_results(folder, [RESULTS / "first-light" / card])
    assert disagreements(results) == []
    compared = 0
    missed: list[tuple[str, str]] = []
    for difference in differences(results):
        if "0.5B" in difference.point and "vllm" in difference.point:
            assert abs(difference.share) < SMALL_ENGINES, difference
        elif difference.figure in (ALLOCATED, DEVICE):
            if difference.is_large:
                missed.append((difference.figure, difference.point))
            compared += 1
    assert missed == MISSED[card]
    assert compared >= 24


@pytest.mark.parametrize(
    ("runs", "card", "points"),
    [("first-light", "H200", 14), ("first-light-emulated", "A100-40G", 24)],
)
def test_predictions_after_mending_agree_in_every_point(runs: str, card: str, points: int) -> None:
    """Second readings, on a real and on an emulated card: no point misses 1 % and 3 %."""
    predictions = RESULTS / "first-light" / card
    results = read_results(RESULTS / runs / card, [predictions])
    text = (predictions / "predicted-after-mending.json").read_text()
    results.predicted.update(json.loads(text))
    assert disagreements(results) == []
    memory = [
        difference
        for difference in differences(results)
        if difference.figure in (ALLOCATED, DEVICE)
    ]
    assert len(memory) == 2 * points
    assert not any(difference.is_large for difference in memory)


def test_verdicts_of_the_measured_card_agree_with_the_predictions_made_beforehand() -> None:
    """One of the points of the H200 runs out of memory in its first forward pass."""
    results = read_results(RESULTS / "first-light" / "H200")
    assert disagreements(results) == []
    outcomes = [line["outcome"] for line in results.measured if line["kind"] == "point"]
    assert outcomes.count("ok") == 14
    assert outcomes.count("oom_forward") == 1

"""The benchmark of intervals: how a stored study is judged, and the committed result where there
is one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from intervals import CONFIRMED, RESULTS, spreads, summary


def study(*ratios: float) -> dict[str, Any]:
    """Return a study whose confirmations are so many times faster than the probes."""
    seconds, tokens = [1.0, 1.01, 1.02], [1000, 1000, 1000]
    probe = {"seconds": seconds, "tokens": tokens}
    pairs = []
    for ratio in ratios:
        faster = [duration / ratio for duration in seconds]
        pairs.append([probe, {"seconds": faster, "tokens": tokens}])
    return {"pairs": pairs}


def test_pairs_far_apart_do_not_overlap_and_near_ones_do() -> None:
    result = summary([study(1.0, 1.01, 1.0, 0.99, 1.01, 1.0, 3.0, 1.0)], confirmed=0)
    assert (result["pairs"], result["overlapping"]) == (8, 7)


def test_a_spread_is_learned_from_the_pair_and_as_many_others_as_a_search_confirms() -> None:
    repeats = []
    for _, spread in spreads(study(1.0, 1.1, 1.0, 1.1), confirmed=CONFIRMED):
        repeats.append(spread.repeats)
    assert repeats == [CONFIRMED] * 4
    assert [spread.repeats for _, spread in spreads(study(1.0, 1.1), confirmed=0)] == [0, 0]


def test_unsteady_studies_have_wider_intervals() -> None:
    steady = summary([study(*[1.0] * 8)], confirmed=CONFIRMED)["median_half_width"]
    unsteady = summary([study(*[1.5] * 8)], confirmed=CONFIRMED)["median_half_width"]
    assert unsteady > 3 * steady


@pytest.mark.parametrize("name", ["intervals.json", "intervals-second.json"])
def test_the_committed_result_is_that_of_its_studies(name: str) -> None:
    stored = json.loads((RESULTS.parent / name).read_text())
    for learned, confirmed in (("probes alone", 0), ("finalists", CONFIRMED)):
        result = summary(stored["studies"], confirmed=confirmed)
        assert result == stored["result"][learned]
        assert result["overlapping"] >= 0.95 * result["pairs"]

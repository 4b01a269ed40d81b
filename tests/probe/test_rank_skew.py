"""Ranks that are apart, and peaks of varied lengths, merged from what the ranks report."""

from __future__ import annotations

import pytest

from autotune.probe.assembly import lowest_peak, merge_speeds
from autotune.probe.message_validation import RankResult, RankSpeed


def speed(rollout: float, forward: float) -> RankSpeed:
    return RankSpeed(
        completion_tokens=8,
        cycle_seconds=[5.0, 5.0],
        cycle_loss_tokens=[80, 80],
        prompt_tokens=10,
        phase_seconds={"rollout": rollout, "forward": forward, "other": 0.0},
        left_out_cycles=1,
        steady=True,
    )


def test_a_rank_that_waits_for_the_other_shows_in_the_phases() -> None:
    """Both cycles take 5 s on both ranks: the second waits in its forward pass."""
    merged = merge_speeds([speed(6.0, 4.0), speed(4.5, 5.5)])
    assert merged is not None
    assert merged.rank_skew == pytest.approx({"rollout": 1.5, "forward": 1.5, "other": 0.0})
    assert (merged.left_out_cycles, merged.steady) == (1, True)
    of_one_rank = merge_speeds([speed(6.0, 4.0)])
    assert of_one_rank is not None and of_one_rank.rank_skew == {}


def test_the_peak_of_the_longest_lengths_is_told_from_that_of_varied_ones() -> None:
    results = [
        RankResult(peak_bytes=100, longest_peak_bytes=90),
        RankResult(peak_bytes=120, longest_peak_bytes=115),
    ]
    assert lowest_peak(500, results) == 490
    assert lowest_peak(500, [RankResult(peak_bytes=100)]) is None
    assert lowest_peak(None, results) is None

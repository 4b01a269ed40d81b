"""Chance of fitting by the half of a predicted interval in which the limit may be.

Under pressure torch empties its cache, so that the lower half is often far wider than the upper.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest

from autotune.core.prediction import Estimate
from autotune.search.loop import legal_candidates
from autotune.search.study import open_study
from autotune.search.surrogate.estimates import Estimates
from tests.simulated import MIB, Machine, Oracle, ToyTrainer, toy_job, toy_space

LIMIT_BYTES = 1000 * MIB


def estimates(
    folder: Path,
    value: float,
    low: float,
    high: float,
) -> Estimates:
    """Return the estimates of one candidate whose predicted peak has these shares of the limit."""
    space = toy_space(
        batch=(4,),
        checkpointing=(True,),
        use_vllm=(False,),
        num_generations=(8,),
        max_completion_length=(64,),
    )
    job = toy_job(folder, space, LIMIT_BYTES, storage="memory://")
    candidates = legal_candidates(job, ToyTrainer())
    predictions = Oracle(Machine(limit_bytes=LIMIT_BYTES)).screen(candidates)
    peak = Estimate(
        value=value,
        low=low,
        high=high,
    ).scaled(LIMIT_BYTES)
    for name, prediction in predictions.items():
        predictions[name] = replace(prediction, peak_memory_bytes=peak, fits=None)
    return open_study(job, candidates, None, predictions).view.estimates


def test_a_long_lower_half_makes_no_candidate_unlikely_to_fit(tmp_path: Path) -> None:
    """90 % of the limit, at most 95 %: only the least width of 8 % counts, log(0.9) / 0.08 = -1.3
    deviations. The whole interval from 30 % on would be 39 % wide, and the chance 0.6.
    """
    expected = NormalDist().cdf(-math.log(0.9) / 0.08)
    fits = estimates(tmp_path, 0.9, 0.3, 0.95).fits
    assert fits == pytest.approx([expected], abs=1e-3)
    assert expected > 0.9


def test_what_may_fit_under_pressure_is_not_refused(tmp_path: Path) -> None:
    """120 % of the limit, but 98 % under pressure. Half of the whole interval, 6 %, would refuse
    it.
    """
    assert not estimates(tmp_path, 1.2, 0.98, 1.21).refused.any()


def test_what_needs_more_than_the_limit_under_pressure_too_is_refused(tmp_path: Path) -> None:
    assert estimates(tmp_path, 1.3, 1.15, 1.8).refused.all()

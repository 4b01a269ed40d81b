"""Next confirmation, with estimates of log speed 0 ± 0.1 and a noise of 0.1, worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.core.measurement import Cost
from autotune.search.agenda import worthwhile_gains
from autotune.search.confirmation import _unclear_rival, next_confirmation
from autotune.search.trial_view import TrialView
from tests.search.test_beliefs import FITTING, problem, trial, view_with_estimate

FIRST, SECOND = [member for member in problem().tiers[0].candidates if member in FITTING][:2]
SECONDS = 1e6


def probed(candidate: Any, number: int, seconds: float = 1e4) -> Any:
    probe = trial(candidate, number)
    cost = Cost(total_seconds=seconds, load_seconds=0.0)
    return replace(probe, measurement=replace(probe.measurement, cost=cost))


def confirmed(candidate: Any, number: int, log_speed: float) -> Any:
    turn = trial(candidate, number, purpose="confirm", rate=math.exp(log_speed))
    cost = Cost(total_seconds=1.0, load_seconds=0.0)
    return replace(turn, measurement=replace(turn.measurement, cost=cost))


@pytest.mark.parametrize(
    ("probe_seconds", "last_turn"),
    [
        (259.2, 12),  # A confirmation takes 0.003 of two days. (13 · 14): 0.00296
        (172.8, 19),  # 0.002 of two days. (20 · 21): 0.00195
        (1.0, 79),  # LEAST_GAIN, 0.0005. (80 · 81): 0.000497; (79 · 80): 0.000502
    ],
)
def test_equals_are_confirmed_again_until_a_turn_does_not_pay_off(
    probe_seconds: float, last_turn: int
) -> None:
    """After k turns of each a belief is 0 ± 0.1 / √(k + 1). The next turn moves it by
    0.1 / √((k + 1)(k + 2)), which is worth 0.4 times that.
    """
    trials = [probed(FIRST, 0, probe_seconds), probed(SECOND, 1, probe_seconds)]
    for turn in range(1, last_turn + 1):
        trials.append(confirmed(FIRST, 2 * turn, 0.0))
        trials.append(confirmed(SECOND, 2 * turn + 1, 0.0))
        view = view_with_estimate(trials)
        is_confirmed_again = next_confirmation(view, SECONDS) is not None
        assert is_confirmed_again is (turn < last_turn), turn


@pytest.mark.parametrize(
    ("probe_seconds", "is_repeated"),
    [
        (104.0, True),
        (118.0, False),
    ],
)
def test_pairs_go_on_while_the_gain_pays_for_those_that_show_it(
    probe_seconds: float, is_repeated: bool
) -> None:
    """After two pairs with a gain of 0.04, σ² is 4 · 2 · 0.04² / 5, and t of 5 degrees at 99 % 3.31
    by its expansion: a half width of 3.31 · 0.0506 / √2 = 0.118. 2 · (0.118 / 0.04)² = 17.5 pairs
    have one of 0.04: 15.5 more, 62 probes. 0.04 of two days are 6,912 s, 111.4 s for each.
    """
    trials = [probed(FIRST, 0, probe_seconds), probed(SECOND, 1, probe_seconds)]
    for turn in (1, 2):
        trials.append(confirmed(FIRST, 2 * turn, 0.0))
        trials.append(confirmed(SECOND, 2 * turn + 1, 0.04))
    view = view_with_estimate(trials)
    view.baseline = FIRST
    view.run_spread = replace(view.run_spread, step_deviation=0.04)
    assert (_unclear_rival(view, SECONDS) is not None) is is_repeated


@pytest.mark.parametrize(
    ("probe_seconds", "gain"),
    [
        (10.0, 0.0005),  # 0.00006 of two days
        (172.8, 0.001),
        (1728.0, 0.01),
    ],
)
def test_a_probe_has_to_pay_off_in_two_days_of_training(probe_seconds: float, gain: float) -> None:
    probe = probed(FIRST, 0, probe_seconds)
    view: Any = TrialView(problem(), [probe])
    rate = probe.measurement.ranking_speed
    assert rate is not None
    speed = replace(
        view.estimates.speed, mean=np.full(len(view.table), math.log(rate.tokens_per_second))
    )
    view.estimates = replace(view.estimates, speed=speed, fits=np.ones(len(view.table)))
    least = worthwhile_gains(view)[view.table.row_by_id[FIRST.id]]
    assert least == pytest.approx(gain)

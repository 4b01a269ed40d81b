"""Next confirmation, with estimates of log speed 0 ± 0.1 and a noise of 0.1, worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.core.measurement import Cost
from autotune.search.agenda import worthwhile_gains
from autotune.search.confirmation import next_confirmation
from autotune.search.trial_view import TrialView
from tests.search.test_beliefs import FITTING, problem, trial, view_with_estimate

FIRST, SECOND = [member for member in problem().tiers[0].candidates if member in FITTING][:2]
SECONDS = 1e6


def probed(candidate: Any, number: int, seconds: float = 1e4) -> Any:
    probe = trial(candidate, number)
    cost = Cost(total_seconds=seconds, load_seconds=0.0)
    return replace(probe, measurement=replace(probe.measurement, cost=cost))


def confirmed(candidate: Any, number: int, log_speed: float) -> Any:
    return trial(candidate, number, purpose="confirm", rate=math.exp(log_speed))


@pytest.mark.parametrize(
    ("log_speed", "is_repeated"),
    [
        (-0.5, True),  # beyond 3 · √(0.1² + 0.1²) = 0.42
        (-0.35, False),
    ],
)
def test_a_confirmation_that_contradicts_the_probe_is_repeated(
    log_speed: float,
    is_repeated: bool,
) -> None:
    """Both probes had log speed 0: one that was disturbed when it was confirmed may be the best."""
    trials = [
        probed(FIRST, 0),
        probed(SECOND, 1),
        confirmed(FIRST, 2, -0.1),
        confirmed(FIRST, 3, -0.1),
        confirmed(SECOND, 4, log_speed),
    ]
    repeated = next_confirmation(view_with_estimate(trials), SECONDS)
    assert (repeated == SECOND) is is_repeated


def test_equals_are_confirmed_again_until_a_turn_teaches_too_little() -> None:
    """After k turns of each a belief is 0 ± 0.1 / √(k + 1). The next turn moves it by
    0.1 / √((k + 1)(k + 2)), which is worth 0.4 times that: 0.0163 after one, 0.0042 after eight,
    when no further turn is taken.
    """
    trials = [probed(FIRST, 0), probed(SECOND, 1)]
    for turn in range(1, 9):
        trials.append(confirmed(FIRST, 2 * turn, 0.0))
        trials.append(confirmed(SECOND, 2 * turn + 1, 0.0))
        view = view_with_estimate(trials)
        expected = turn < 8
        assert (next_confirmation(view, SECONDS) is not None) is expected, turn


@pytest.mark.parametrize(
    ("probe_seconds", "gain"),
    [
        (10.0, 0.001),  # 0.0001 of a day
        (172.8, 0.002),
        (1000.0, 0.003),  # 0.0116
    ],
)
def test_a_probe_has_to_pay_off_in_a_day_of_training(probe_seconds: float, gain: float) -> None:
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

"""What is believed while probes are under way: they lessen doubts, say nothing else, and cost little to reckon with."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.study.beliefs import CROWD, Mind
from autotune.study.regression import Kernels, Observed, Regression, posterior
from autotune.study.view import Ground, View
from tests.study.test_beliefs import CANDIDATES, FITTING, TABLE, foreseen, measured, mind

AMPLITUDE = np.full(len(TABLE), 0.5)
STRUCTURE = (0.5, 0.35, 0.1, 0.05)
SEEN = np.array([3, 17, 40])
NOTHING = Observed(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))
SOME = Observed(SEEN, np.array([0.1, -0.2, 0.05]), np.zeros(3))
AWAITED = np.array([5, 23, 41, 60])
NOBODY = np.zeros(0, dtype=np.int64)


def regression() -> Regression:
    return Regression(Kernels(TABLE), AMPLITUDE, (0.03,), (STRUCTURE,))


def test_doubt_left_is_what_the_same_measurements_would_leave_whatever_they_turn_out_to_be() -> None:
    """Held against the plain formula, with the one model that is there before anything was measured."""
    kernels = Kernels(TABLE)
    covariance = sum(share * part for share, part in zip(STRUCTURE, kernels.between(np.arange(len(TABLE))), strict=True)) * 0.25
    among = covariance[np.ix_(AWAITED, AWAITED)] + 0.03**2 * np.eye(len(AWAITED))
    left = np.diag(covariance) - np.einsum("ij,ji->i", covariance[:, AWAITED], np.linalg.solve(among, covariance[AWAITED]))
    share = np.sqrt(left / np.diag(covariance))
    assert np.allclose(regression().after(NOTHING, AWAITED).deviation, AMPLITUDE * share, atol=1e-6)


def test_means_are_those_of_what_was_measured_and_doubt_only_shrinks() -> None:
    alone = posterior(Kernels(TABLE), AMPLITUDE, SOME, (0.03,), (STRUCTURE,))
    asked = regression()
    assert np.array_equal(asked.after(SOME, NOBODY).deviation, alone.deviation)
    then = asked.after(SOME, AWAITED)
    assert np.array_equal(then.mean, alone.mean)
    assert (then.deviation <= alone.deviation + 1e-12).all()
    assert (then.deviation[AWAITED] < 0.5 * alone.deviation[AWAITED]).all(), "those that are awaited will be known"


def test_one_after_another_leaves_the_same_as_all_at_once_and_so_does_another_beginning() -> None:
    grown = regression()
    for count in range(1, len(AWAITED) + 1):
        grown.after(SOME, AWAITED[:count])
    at_once = regression().after(SOME, AWAITED).deviation
    assert np.allclose(grown.after(SOME, AWAITED).deviation, at_once, rtol=1e-9)
    fewer = regression().after(SOME, AWAITED[:2]).deviation
    assert np.allclose(grown.after(SOME, AWAITED[:2]).deviation, fewer, rtol=1e-9), "one that was handed back tells nothing"
    other = Observed(SEEN, SOME.distance + 0.1, SOME.variance)
    assert np.allclose(grown.after(other, AWAITED).deviation, regression().after(other, AWAITED).deviation, rtol=1e-9)


@pytest.mark.parametrize("predictions", [{}, foreseen(1.1)], ids=["guessed", "predicted"])
def test_beliefs_among_many_pending_do_not_depend_on_what_was_asked_before(predictions: dict[str, object]) -> None:
    """A study that is resumed believes what the one that went on believes, though not every outcome is heard at once."""
    trials = measured(FITTING[:20])
    pending = frozenset(one.id for one in FITTING[20 : 20 + 3 * CROWD])
    going_on = mind(predictions)  # type: ignore[arg-type]
    for count in range(1, len(trials)):
        going_on.after(trials[:count], pending)
    long_running, resumed = going_on.after(trials, pending), mind(predictions).after(trials, pending)  # type: ignore[arg-type]
    assert np.allclose(long_running.speed.deviation, resumed.speed.deviation, rtol=1e-9)
    assert np.array_equal(long_running.speed.mean, resumed.speed.mean)
    assert np.allclose(long_running.fits, resumed.fits, rtol=1e-9)


def test_with_few_pending_every_outcome_is_heard_and_with_none_nothing_is_expected() -> None:
    trials = measured(FITTING[:7])
    few = frozenset(one.id for one in FITTING[20 : 20 + CROWD - 1])
    alone = mind({}).after(trials)
    beside = mind({}).after(trials, few)
    assert np.array_equal(beside.speed.mean, alone.speed.mean) and np.array_equal(beside.need.mean, alone.need.mean)
    assert (beside.speed.deviation <= alone.speed.deviation + 1e-12).all()


def test_what_an_outcome_settles_is_heard_at_once_however_many_are_pending() -> None:
    beyond = [one for one in CANDIDATES if one not in FITTING]
    trials = measured([*FITTING[:3], beyond[0]])
    pending = frozenset(one.id for one in FITTING[20 : 20 + 8 * CROWD])
    assert len(trials) % (1 + len(pending) // CROWD), "the case must hold outcomes that are not heard yet"
    assert mind({}).after(trials, pending).fits[TABLE.place[beyond[0].id]] == 0.0


def test_nobody_thinks_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without predictions a stock sampler needs no beliefs, and with thousands of candidates they are what takes long."""

    def think(*_: object) -> None:
        raise AssertionError("nobody asked")

    ground = Ground(TABLE, (), mind({}), None)
    monkeypatch.setattr(Mind, "after", think)
    view = View(ground, measured(FITTING[:3]))
    assert view.is_open(FITTING[5]) and not view.is_open(FITTING[0]) and not view.screened

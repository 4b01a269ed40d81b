"""Estimates with pending probes: these reduce deviations, change no means, and cost little time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from autotune.core.space import Candidate
from autotune.search.surrogate.estimates import PENDING_PER_DELAYED, SurrogateModel
from autotune.search.surrogate.gaussian_process import Fit, Observations, Regression
from autotune.search.surrogate.similarity import Kernels
from autotune.search.trial_view import SearchProblem, TrialView
from tests.search.test_estimates import CANDIDATES, FITTING, TABLE, foreseen, measured, surrogate

AMPLITUDE = np.full(len(TABLE), 0.5)
STRUCTURE = (0.5, 0.35, 0.1, 0.05)
SEEN = np.array([3, 17, 40])
NOTHING = Observations(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))
SOME = Observations(SEEN, np.array([0.1, -0.2, 0.05]), np.zeros(3))
AWAITED = np.array([5, 23, 41, 60])
NOBODY = np.zeros(0, dtype=np.int64)


def _ids(candidates: Sequence[Candidate]) -> frozenset[str]:
    return frozenset(candidate.id for candidate in candidates)


def regression() -> Regression:
    return Regression(Kernels(TABLE), AMPLITUDE, (0.03,), (STRUCTURE,))


def test_pending_deviation_equals_that_after_the_same_measurements() -> None:
    """Compare with the plain formula, under the default model before any observation."""
    kernels = Kernels(TABLE)
    covariance = (
        sum(
            share * part
            for share, part in zip(STRUCTURE, kernels.rows(np.arange(len(TABLE))), strict=True)
        )
        * 0.25
    )
    among = covariance[np.ix_(AWAITED, AWAITED)] + 0.03**2 * np.eye(len(AWAITED))
    variance = np.diag(covariance) - np.einsum(
        "ij,ji->i", covariance[:, AWAITED], np.linalg.solve(among, covariance[AWAITED])
    )
    share = np.sqrt(variance / np.diag(covariance))
    assert np.allclose(
        regression().posterior(NOTHING, AWAITED).deviation, AMPLITUDE * share, atol=1e-6
    )


def test_pending_probes_leave_means_and_shrink_deviations() -> None:
    without_pending = Fit(Kernels(TABLE), AMPLITUDE, SOME, (0.03,), (STRUCTURE,)).posterior
    fitted = regression()
    assert np.array_equal(fitted.posterior(SOME, NOBODY).deviation, without_pending.deviation)
    then = fitted.posterior(SOME, AWAITED)
    assert np.array_equal(then.mean, without_pending.mean)
    assert (then.deviation <= without_pending.deviation + 1e-12).all()
    assert (then.deviation[AWAITED] < 0.5 * without_pending.deviation[AWAITED]).all(), (
        "those that are awaited will be known"
    )


def test_one_after_another_leaves_the_same_as_all_at_once_and_so_does_another_beginning() -> None:
    grown = regression()
    for count in range(1, len(AWAITED) + 1):
        grown.posterior(SOME, AWAITED[:count])
    at_once = regression().posterior(SOME, AWAITED).deviation
    assert np.allclose(grown.posterior(SOME, AWAITED).deviation, at_once, rtol=1e-9)
    fewer = regression().posterior(SOME, AWAITED[:2]).deviation
    assert np.allclose(grown.posterior(SOME, AWAITED[:2]).deviation, fewer, rtol=1e-9), (
        "one that was handed back tells nothing"
    )
    observations = Observations(SEEN, SOME.residual + 0.1, SOME.variance)
    assert np.allclose(
        grown.posterior(observations, AWAITED).deviation,
        regression().posterior(observations, AWAITED).deviation,
        rtol=1e-9,
    )


@pytest.mark.parametrize("predictions", [{}, foreseen(1.1)], ids=["guessed", "predicted"])
def test_estimates_with_many_pending_do_not_depend_on_earlier_calls(
    predictions: dict[str, object],
) -> None:
    """A resumed study has the same estimates as an uninterrupted one, despite delayed outcomes."""
    trials = measured(FITTING[:20])
    pending = _ids(FITTING[20 : 20 + 3 * PENDING_PER_DELAYED])
    going_on = surrogate(predictions)  # type: ignore[arg-type]
    for count in range(1, len(trials)):
        going_on.estimate(trials[:count], pending)
    long_running, resumed = (
        going_on.estimate(trials, pending),
        surrogate(predictions).estimate(trials, pending),
    )  # type: ignore[arg-type]
    assert np.allclose(long_running.speed.deviation, resumed.speed.deviation, rtol=1e-9)
    assert np.array_equal(long_running.speed.mean, resumed.speed.mean)
    assert np.allclose(long_running.fits, resumed.fits, rtol=1e-9)


def test_with_few_pending_every_outcome_is_used_and_with_none_no_outcome_is_expected() -> None:
    trials = measured(FITTING[:7])
    few = _ids(FITTING[20 : 20 + PENDING_PER_DELAYED - 1])
    without_pending = surrogate({}).estimate(trials)
    with_pending = surrogate({}).estimate(trials, few)
    assert np.array_equal(with_pending.speed.mean, without_pending.speed.mean)
    assert np.array_equal(with_pending.need.mean, without_pending.need.mean)
    assert (with_pending.speed.deviation <= without_pending.speed.deviation + 1e-12).all()


def test_implications_apply_at_once_with_any_number_pending() -> None:
    beyond = [candidate for candidate in CANDIDATES if candidate not in FITTING]
    trials = measured([*FITTING[:3], beyond[0]])
    pending = _ids(FITTING[20 : 20 + 8 * PENDING_PER_DELAYED])
    assert len(trials) % (1 + len(pending) // PENDING_PER_DELAYED), (
        "the case must hold outcomes that are not heard yet"
    )
    assert surrogate({}).estimate(trials, pending).fits[TABLE.row_by_id[beyond[0].id]] == 0.0


def test_estimates_are_not_computed_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without predictions a stock sampler needs no beliefs, and with thousands of candidates
    they are what takes long.
    """

    def think(*_: object) -> None:
        raise AssertionError("nobody asked")

    problem = SearchProblem(
        tiers=(),
        surrogate=surrogate({}),
        baseline=None,
    )
    monkeypatch.setattr(SurrogateModel, "estimate", think)
    view = TrialView(problem, measured(FITTING[:3]))
    assert view.is_open(FITTING[5])
    assert not view.is_open(FITTING[0])
    assert not view.screened

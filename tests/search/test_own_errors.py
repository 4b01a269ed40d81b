"""The predicted order is followed, until residuals say that candidates differ by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from autotune.search.acquisition import weights_of_fitting
from autotune.search.surrogate.throughput_model import ThroughputModel
from tests.search.test_estimates import CANDIDATES, MACHINE, measured
from tests.search.test_throughput_model import CANDIDATES as PREDICTED
from tests.search.test_throughput_model import NOBODY, NOISE, TABLE, predicted
from tests.search.test_throughput_model import measured as timed


def test_a_likely_candidate_counts_as_one_that_fits_until_memory_ran_out() -> None:
    chances = np.array([0.9, 0.5, 0.4])
    assert weights_of_fitting(chances, []) == pytest.approx([1.0, 1.0, 0.4**1.5])
    most_demanding = max(CANDIDATES, key=MACHINE.need)
    ran_out = measured([most_demanding])
    assert ran_out[0].measurement.outcome.is_out_of_memory
    assert weights_of_fitting(chances, ran_out) == pytest.approx([0.729, 0.125, 0.064])


def deviation_of_unmeasured(errors: Sequence[float]) -> float:
    """Return the deviation of an unmeasured candidate's lead, after candidates that are predicted
    equal were measured with these errors of their seconds.
    """
    trials = []
    for candidate, error in zip(PREDICTED, errors, strict=False):
        trials.append(timed(candidate, rollout=error, forward=error, backward=error))
    model = ThroughputModel(TABLE, list(map(predicted, PREDICTED)))
    posterior = model.posterior(trials, NOBODY, NOISE)
    _, deviation = posterior.lead_over(TABLE.row_by_id[PREDICTED[0].id])
    unmeasured = PREDICTED[len(errors)]
    return float(deviation[TABLE.row_by_id[unmeasured.id]])


def test_residuals_of_the_study_say_how_much_candidates_differ() -> None:
    alike = deviation_of_unmeasured([1.1] * 6)
    differing = deviation_of_unmeasured([1.2, 1.0, 1.15, 1.05, 1.25, 0.95])
    assert alike < 0.03, "one error that all have in common"
    assert differing > 0.05, "their scatter around it is 0.1"

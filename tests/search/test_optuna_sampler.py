"""Optuna's own tests of a sampler, run against ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from optuna.samplers import BaseSampler
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    RelativeSamplerTestCase,
    SingleOnlySamplerTestCase,
)

from autotune.core.job import SamplerName
from autotune.search.problem import baseline_candidate, legal_candidates, search_problem
from autotune.search.sampler import PredictedSampler
from tests.simulated import MIB, ToyTrainer, toy_job, toy_space


def toy_sampler(folder: Path, name: SamplerName = "value") -> PredictedSampler:
    trainer = ToyTrainer()
    job = toy_job(folder, toy_space(), 900 * MIB, sampler=name)
    candidates = legal_candidates(job, trainer)
    problem = search_problem(job, candidates, baseline_candidate(job, trainer))
    return PredictedSampler(job, problem)


class TestPredictedSampler(
    BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase
):
    """Studies of other search spaces too: what the sampler does not know it draws."""

    @pytest.fixture(params=["value", "tpe"])
    def sampler(self, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], BaseSampler]:
        return lambda: toy_sampler(tmp_path, request.param)

"""Sampler of Optuna: the next candidate from the predictions and the study's trials.

    sampler = PredictedSampler(job)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, n_trials=100, callbacks=[StopAtEnd(sampler)])

Optuna calls `sample_relative` once per trial. It reads the finished and running trials, lets the
agenda name a pool of candidates worth measuring, and returns the values of one of them: of the one
with the highest acquisition value, or, where `job.sampler` names another sampler of Optuna, of the
one nearest to its proposal. TPE, GP and random search so run over the legal, predicted candidates.

The state is in the study: a sampler in another process, which reads the same trials, continues at
the same point.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autotune import frameworks
from autotune.core.answer import Purpose, Trial
from autotune.core.errors import MissingExtra
from autotune.core.job import Job, SamplerName
from autotune.core.space import Candidate
from autotune.prediction.service import predict_candidates
from autotune.search.acquisition import most_valuable
from autotune.search.agenda import NextProbe, RemainingBudget, SearchEnd, Wait, next_step
from autotune.search.claims import Claims, has_ended, process_name
from autotune.search.parameters import Parameters
from autotune.search.problem import baseline_candidate, legal_candidates, search_problem
from autotune.search.surrogate.candidate_table import IndexArray
from autotune.search.trial_storage import (
    CANDIDATE_ID,
    DRIVER,
    candidate_of,
    read_trial,
    rebuilt_trial,
    start_attributes,
)
from autotune.search.trial_view import SearchProblem, TrialView

STARTUP_TRIALS = 5  # Random trials before the model of another sampler
POLL_SECONDS = 0.2  # Between two looks at the probes that a confirmation waits for
NO_LIMITS = RemainingBudget(seconds=float("inf"), probes=10**9)


class NothingToMeasure(optuna.TrialPruned):
    """Ends a trial for which no candidate is left, or none until a running one ends."""

    def __init__(self, step: Wait | SearchEnd) -> None:
        super().__init__("No candidate is left that may be better.")
        self.step = step


class PredictedSampler(BaseSampler):
    """Sampler over the candidates of one job, for one study."""

    def __init__(
        self,
        job: Job,
        problem: SearchProblem | None = None,
        *,
        claims: Claims | None = None,
        waits: bool = True,
    ) -> None:
        """`problem`: the job's candidates and predictions; without it they are computed.
        `claims`: of the drivers that share the study. `waits`: `sample_relative` waits until a
        confirmation may run, alone; False where the same thread would have to end the other trials.
        """
        self.problem = problem or _problem_of(job)
        table = self.problem.surrogate.table
        seed = job.task.workload.seed
        self.parameters = Parameters(table.space, table.candidates)
        self.claims = claims
        self.budget: Callable[[], RemainingBudget] = lambda: NO_LIMITS
        self.trials: tuple[Trial, ...] = ()  # Measured, in the order of reading
        self._waits = waits
        self._proposals = _proposing_sampler(job.sampler, seed)
        self._independent = RandomSampler(seed=seed)
        self._random = random.Random(seed)
        self._driver = process_name()
        if claims is not None:
            self._driver = claims.driver
        self._lock = threading.RLock()  # of the threads of `optimize(n_jobs=...)`
        self._read: set[int] = set()  # Numbers of the finished trials that were read
        self._view: TrialView | None = None
        # By trial number: two candidates may differ only in settings that are no parameters
        self._chosen: dict[int, Candidate] = {}

    # 1. State of the study.

    def view(self, study: optuna.Study, but: int | None = None) -> TrialView:
        """Return the state of the study by its finished and running trials. `but`: number of a
        trial to ignore, which has no candidate yet.
        """
        with self._lock:
            pending: set[str] = set()
            if self.claims is not None:
                pending |= self.claims.candidates_of_others()
            for frozen in study.get_trials(deepcopy=False):
                if frozen.state.is_finished():
                    self._read_finished(study, frozen)
                elif frozen.number != but and frozen.state is TrialState.RUNNING:
                    pending |= self._candidate_ids(frozen)
            view = self._view
            if view is None or view.pending != pending or view.all != self.trials:
                view = TrialView(self.problem, self.trials, frozenset(pending))
                self._view = view
            return view

    def _read_finished(self, study: optuna.Study, frozen: FrozenTrial) -> None:
        if frozen.number in self._read:
            return
        self._read.add(frozen.number)
        trial = read_trial(frozen)
        candidate = self.parameters.candidate_of(frozen.params)
        if trial is None and candidate is not None and CANDIDATE_ID not in frozen.user_attrs:
            if study.direction is not StudyDirection.MAXIMIZE:
                raise ValueError('Speed is maximized: create the study with direction="maximize".')
            trial = rebuilt_trial(frozen, candidate, self.problem.surrogate.limit_bytes)
        if trial is not None:
            self.trials = (*self.trials, trial)

    def _candidate_ids(self, running: FrozenTrial) -> set[str]:
        """Return the id of the running trial's candidate, if it has one and its process lives."""
        candidate = candidate_of(running) or self.parameters.candidate_of(running.params)
        if candidate is None or has_ended(running.user_attrs.get(DRIVER)):
            return set()
        return {candidate.id}

    def next_step(
        self, study: optuna.Study, but: int | None = None
    ) -> NextProbe | Wait | SearchEnd:
        """Return what the agenda decides by the trials so far."""
        return self.step_by(self.view(study, but))

    def step_by(self, view: TrialView) -> NextProbe | Wait | SearchEnd:
        budget = self.budget()
        remaining = replace(budget, probes=budget.probes - len(view.pending))
        return next_step(view, remaining)

    # 2. The next candidate.

    def suggest(self, trial: optuna.Trial) -> Candidate:
        """Return the trial's candidate; its values are requested from the trial."""
        if all(values.single() for values in self.parameters.distributions.values()):
            _ = trial.relative_params  # Optuna samples only parameters with several values
        params = self.parameters.suggest(trial)
        chosen = self._chosen.pop(trial.number, None)
        if chosen is not None and self.parameters.of(chosen).items() <= params.items():
            return chosen
        candidate = self.parameters.candidate_of(params)
        if candidate is None:  # Of an enqueued trial
            raise optuna.TrialPruned(f"No legal candidate has the values {params}.")
        return candidate

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self.parameters.distributions

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        self._raise_error_if_multi_objective(study)
        params: dict[str, Any] = {}
        if self.parameters.distributions.keys() <= search_space.keys():
            candidate = self._next_candidate(study, trial)
            while candidate is None:
                time.sleep(POLL_SECONDS)
                candidate = self._next_candidate(study, trial)
            return dict(self.parameters.of(candidate))
        # Another space, of which nothing is predicted
        for name, distribution in search_space.items():
            params[name] = self.sample_independent(study, trial, name, distribution)
        return params

    def _next_candidate(self, study: optuna.Study, trial: FrozenTrial) -> Candidate | None:
        """Choose a candidate and write it into the trial, before any other process or thread; None
        while another trial has to end first.
        """
        with self._lock:
            view = self.view(study, trial.number)
            step = self.step_by(view)
            if isinstance(step, Wait) and self._waits:
                return None
            if not isinstance(step, NextProbe):
                raise NothingToMeasure(step)
            candidate = self._choose(step, view, study, trial)
            attributes = self.start_attributes(candidate, step.purpose)
            for key, value in attributes.items():
                study._storage.set_trial_user_attr(trial._trial_id, key, value)
                trial.user_attrs[key] = value  # Optuna reads them once per trial
            self._chosen[trial.number] = candidate
            if self.claims is None or self._claim(study, trial, step.purpose, candidate):
                return candidate
            return self._next_candidate(study, trial)

    def _claim(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        purpose: Purpose,
        candidate: Candidate,
    ) -> bool:
        """Return False if another driver claimed the candidate first, or reported a trial by which
        the choice may differ.
        """
        assert self.claims is not None
        decided_by = self.trials
        claim = self.claim_of(purpose, candidate)
        if not self.claims.take(claim):
            return False
        if self.claims.shared:
            self.view(study, trial.number)
        if self.trials == decided_by:
            return True
        self.claims.release(claim)
        return False

    def start_attributes(self, candidate: Candidate, purpose: Purpose) -> dict[str, Any]:
        return start_attributes(candidate, purpose, self._driver)

    def _choose(
        self,
        step: NextProbe,
        view: TrialView,
        study: optuna.Study,
        trial: FrozenTrial,
    ) -> Candidate:
        pool = step.pool
        if len(pool) == 1:
            row = int(pool[0])
        elif self._proposals is None:
            row = most_valuable(view, pool, self.budget().live)
        else:
            row = self._nearest_to_proposal(self._proposals, study, trial, pool)
        return self.parameters.candidates[row]

    def _nearest_to_proposal(
        self,
        proposals: BaseSampler,
        study: optuna.Study,
        trial: FrozenTrial,
        pool: IndexArray,
    ) -> int:
        """Return the row nearest to the other sampler's proposal, which may be illegal or measured
        already; ties are drawn.
        """
        proposals.before_trial(study, trial)
        space = proposals.infer_relative_search_space(study, trial)
        proposal: dict[str, Any] = {}
        if space:
            proposal = proposals.sample_relative(study, trial, space)
        distances = self.parameters.distances(proposal, pool)
        nearest = pool[distances == distances.min()]
        return int(self._random.choice(nearest))

    def claim_of(self, purpose: Purpose, candidate: Candidate) -> str:
        """Return the key of which only one driver may hold a row at a time."""
        if purpose != "confirm":
            return candidate.id
        turn = sum(
            trial.purpose == "confirm" and trial.candidate == candidate for trial in self.trials
        )
        return f"{candidate.id} confirm {turn}"

    # 3. Other parameters, and random numbers.

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        self._raise_error_if_multi_objective(study)
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        self._random.seed()
        self._independent.reseed_rng()
        if self._proposals is not None:
            self._proposals.reseed_rng()


class StopAtEnd:
    """Callback of `Study.optimize` that stops it once no better candidate is possible."""

    def __init__(self, sampler: PredictedSampler) -> None:
        self._sampler = sampler

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        if isinstance(self._sampler.next_step(study), SearchEnd):
            study.stop()


def _problem_of(job: Job) -> SearchProblem:
    workload = job.task.workload
    trainer = frameworks.trainer(workload.framework, workload.method)
    candidates = legal_candidates(job, trainer)
    baseline = baseline_candidate(job, trainer)
    members = [*candidates, baseline] if baseline else candidates
    predictions = predict_candidates(job, trainer, members)
    return search_problem(job, candidates, baseline, predictions)


def _proposing_sampler(name: SamplerName, seed: int) -> BaseSampler | None:
    """Return Optuna's sampler of that name; None for `value`, the acquisition value."""
    if name == "value":
        return None
    if name == "random":
        return RandomSampler(seed=seed)
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
    try:
        import_module("scipy")
        import_module("torch")
    except ImportError as missing:
        raise MissingExtra("--sampler gp", "train") from missing
    return optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS)

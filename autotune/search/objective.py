"""Objective of Optuna: measures a trial's candidate on this machine.

    probe = Probe(job, sampler)
    study.optimize(probe, n_jobs=probe.slots, callbacks=[StopAtEnd(sampler)])

Returns tokens per second. Reports those of each cycle, sets the constraints, and raises TrialPruned
for a candidate that does not fit or was stopped early.
"""

from __future__ import annotations

import queue
from dataclasses import replace

import optuna
from optuna.trial import TrialState

from autotune import frameworks
from autotune.core.answer import Purpose
from autotune.core.errors import ProbeError
from autotune.core.job import Job
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate
from autotune.probe.executors import open_executor
from autotune.probe.executors.base import Executor
from autotune.search.measured_trial import measured_trial
from autotune.search.probe_cost import LONG_PROBE, SHORT_PROBE
from autotune.search.pruning import cycle_spread, speed_to_reach
from autotune.search.sampler import PredictedSampler
from autotune.search.trial_storage import PURPOSE, WHY, measured_end, write_end
from autotune.search.trial_view import TrialView


def plan_of(
    purpose: Purpose,
    candidate: Candidate,
    view: TrialView,
) -> ProbePlan:
    """Return the plan of a probe, with the speed below which it is stopped early."""
    if view.problem.predicted_rates:  # on emulated GPUs nothing is timed, and no token ends a row
        plan = LONG_PROBE if purpose == "confirm" else SHORT_PROBE
        return replace(plan, settling_cycles=0, varied_lengths=False)
    if purpose == "confirm":
        return LONG_PROBE
    return replace(
        SHORT_PROBE,
        stop_below_tokens_per_second=speed_to_reach(view, purpose, candidate),
        cycle_spread=cycle_spread(view),
    )


class Probe:
    """Objective over the slots of one executor, each used by one thread at a time."""

    def __init__(
        self,
        job: Job,
        sampler: PredictedSampler,
        executor: Executor | None = None,
    ) -> None:
        workload = job.task.workload
        trainer = frameworks.trainer(workload.framework, workload.method)
        self._sampler = sampler
        self._executor = executor or open_executor(job, trainer)
        self._executor.prepare()
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in self._executor.slots:
            self._free.put(slot.number)

    @property
    def slots(self) -> int:
        return len(self._executor.slots)

    def __call__(self, trial: optuna.Trial) -> float:
        # 1. Measure the trial's candidate in a free slot.
        candidate = self._sampler.suggest(trial)
        purpose = trial.user_attrs.get(PURPOSE, "search")
        view = self._sampler.view(trial.study)
        slot = self._free.get()
        try:
            runner = self._executor.open(candidate, slot)
            measurement = runner.measure(candidate, plan_of(purpose, candidate, view))
        finally:
            self._free.put(slot)

        # 2. Record it.
        prediction = self._sampler.problem.predictions.get(candidate.id)
        measured = measured_trial(trial.number, purpose, candidate, measurement, prediction)
        end = measured_end(measured)
        write_end(trial, end)
        if end.state is TrialState.FAIL:
            raise ProbeError(f"The probe was interrupted ({measurement.outcome}).")
        if end.value is None:
            raise optuna.TrialPruned(end.attributes[WHY])
        return end.value

    def close(self) -> None:
        """End every process. Call at the end, also after an interruption."""
        self._executor.close()

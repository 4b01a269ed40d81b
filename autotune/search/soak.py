"""Soak: a long run of the winner; if it does not hold, the next finalist replaces it and is soaked too."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from autotune.core.answer import Recommendation, Trial
from autotune.core.events import Listener, Note
from autotune.core.job import Job
from autotune.core.measurement import Measurement, ProbePlan, Verdict, judge
from autotune.core.run_statistics import assess_soak, describe_soak
from autotune.core.units import format_seconds
from autotune.probe.executors.base import Executor
from autotune.search.conclusion import changes_between, relaxed_in
from autotune.search.trial_view import MAX_ATTEMPTS

GRACE_SECONDS = 600.0  # Time beyond the soak itself: loading, the last cycle, one evaluation and one save
MAX_SOAKS = 3  # Finalists to soak before the answer is that none held


def soak(job: Job, answer: Recommendation, executor: Executor, listener: Listener, seconds: float) -> Recommendation:
    """Return the answer with its soak; with another winner, or none, if the first did not hold."""
    if answer.winner is None:
        return answer
    plan = ProbePlan(
        optimizer_steps=3, soak_seconds=seconds, save_checkpoint=True, evaluate=True, deadline_seconds=seconds + GRACE_SECONDS
    )
    workload = job.task.workload
    steps = {**workload.held, **workload.user_settings}.get("max_steps")  # of the real run, unless the data decide
    failed: tuple[Trial, ...] = ()
    with contextlib.closing(executor):
        for finalist in (answer.winner, *[trial for trial in answer.runner_ups if trial.verdict.fits][: MAX_SOAKS - 1]):
            listener(Note(text=f"Soaking the recommended candidate for {format_seconds(seconds)}, at the longest lengths."))
            try:
                measurement = _measured(executor, finalist, plan)
            except KeyboardInterrupt:
                return replace(answer, interrupted=True)
            if measurement.ended_from_outside:
                assert measurement.failure is not None
                listener(Note(text=f"The soak was interrupted {MAX_ATTEMPTS} times ({measurement.failure.evidence})."))
                return replace(answer, interrupted=True)
            trial = replace(finalist, purpose="confirm", measurement=measurement, verdict=judge(measurement))
            found = assess_soak(measurement, steps if isinstance(steps, int) and steps > 0 else None)
            listener(Note(text=describe_soak(found)))
            seconds_held = trial.measurement.cost.total_seconds * job.task.hardware.count
            answer = replace(answer, soaks=(*answer.soaks, found), probe_seconds=answer.probe_seconds + seconds_held)
            if found.holds:
                return _with_winner(job, answer, finalist, trial, failed)
            why = Verdict(fits=False, why=f"soaked: {found.why}", margin_bytes=trial.verdict.margin_bytes)
            failed = (*failed, replace(trial, verdict=why))
            listener(Note(text="It does not hold; the next finalist replaces it."))
    return replace(
        answer, winner=None, certificate=None, runner_ups=(), changes=(), relaxed={}, refuted=(*answer.refuted, *failed),
        proven="not proven infeasible",
    )  # fmt: skip


def _measured(executor: Executor, finalist: Trial, plan: ProbePlan) -> Measurement:
    """Measure, again if another process ended the probe."""
    for _ in range(MAX_ATTEMPTS):
        measurement = executor.open(finalist.candidate).measure(finalist.candidate, plan)
        if not measurement.ended_from_outside:
            break
    return measurement


def _with_winner(job: Job, answer: Recommendation, winner: Trial, trial: Trial, failed: tuple[Trial, ...]) -> Recommendation:
    """Keep the certificate of a first winner; certify a replacement by its soak."""
    if not failed:
        return answer
    baseline = answer.baseline.candidate if answer.baseline else None
    return replace(
        answer,
        winner=winner,
        certificate=trial,
        refuted=(*answer.refuted, *failed),
        runner_ups=tuple(one for one in answer.runner_ups if one.candidate != winner.candidate),
        changes=() if baseline is None else changes_between(job, baseline, winner.candidate),
        relaxed=relaxed_in(job, winner.candidate),
    )

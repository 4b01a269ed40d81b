"""Soak: a long run of the winner; if it does not hold, the next finalist replaces it and is soaked
too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from autotune.core.answer import Change, Recommendation, Trial
from autotune.core.events import Listener, Note
from autotune.core.job import Job
from autotune.core.measurement import Measurement, ProbePlan, Verdict, judge
from autotune.core.memory_growth import assess_soak, describe_soak
from autotune.core.units import format_seconds
from autotune.probe.executors.base import Executor
from autotune.search.conclusion import changes_between, relaxed_in
from autotune.search.trial_view import MAX_ATTEMPTS

# Time beyond the soak itself: loading, the last cycle, one evaluation and one save
GRACE_SECONDS = 600.0
MAX_SOAKS = 3  # Finalists to soak before the answer is that none held
SOAK_OPTIMIZER_STEPS = 3


def soak(
    job: Job,
    answer: Recommendation,
    executor: Executor,
    listener: Listener,
    seconds: float,
) -> Recommendation:
    """Return the answer with its soak; with another winner, or none, if the first did not hold."""
    if answer.winner is None:
        return answer
    runner_ups = [trial for trial in answer.runner_ups if trial.verdict.fits]
    finalists = [answer.winner, *runner_ups][:MAX_SOAKS]
    steps = _steps_of_real_run(job)
    refuted: list[Trial] = []
    with contextlib.closing(executor):
        for finalist in finalists:
            # 1. Run it for this long.
            _note(
                listener,
                f"Soaking the recommended candidate for {format_seconds(seconds)}, at the longest"
                " lengths.",
            )
            try:
                plan = _plan(seconds)
                measurement = _measured(executor, finalist, plan)
            except KeyboardInterrupt:
                return replace(answer, interrupted=True)
            if measurement.ended_from_outside:
                assert measurement.failure is not None
                _note(
                    listener,
                    f"The soak was interrupted {MAX_ATTEMPTS} times"
                    f" ({measurement.failure.evidence}).",
                )
                return replace(answer, interrupted=True)

            # 2. Report whether it holds.
            result = assess_soak(measurement, steps)
            _note(listener, describe_soak(result))
            device_count = job.task.hardware.count
            device_seconds = measurement.cost.total_seconds * device_count
            answer = replace(
                answer,
                soaks=(*answer.soaks, result),
                probe_seconds=answer.probe_seconds + device_seconds,
            )
            trial = replace(
                finalist,
                purpose="confirm",
                measurement=measurement,
                verdict=judge(measurement),
            )
            if result.holds:
                return _with_winner(job, answer, finalist, trial, refuted)

            # 3. Go on with the next one.
            why = f"soaked: {result.why}"
            verdict = Verdict(
                fits=False,
                why=why,
                margin_bytes=trial.verdict.margin_bytes,
            )
            rejected = replace(trial, verdict=verdict)
            refuted.append(rejected)
            _note(listener, "It does not hold; the next finalist replaces it.")
    return _without_winner(answer, refuted)


def _plan(seconds: float) -> ProbePlan:
    return ProbePlan(
        optimizer_steps=SOAK_OPTIMIZER_STEPS,
        soak_seconds=seconds,
        save_checkpoint=True,
        evaluate=True,
        deadline_seconds=seconds + GRACE_SECONDS,
    )


def _steps_of_real_run(job: Job) -> int | None:
    """Return the optimizer steps of the run that the user plans; None if the data decide."""
    workload = job.task.workload
    settings = {**workload.held_values, **workload.user_settings}
    steps = settings.get("max_steps")
    if isinstance(steps, int) and steps > 0:
        return steps
    return None


def _measured(
    executor: Executor,
    finalist: Trial,
    plan: ProbePlan,
) -> Measurement:
    """Measure, again if another process ended the probe."""
    for _ in range(MAX_ATTEMPTS):
        opened = executor.open(finalist.candidate)
        measurement = opened.measure(finalist.candidate, plan)
        if not measurement.ended_from_outside:
            break
    return measurement


def _with_winner(
    job: Job,
    answer: Recommendation,
    winner: Trial,
    certificate: Trial,
    refuted: Sequence[Trial],
) -> Recommendation:
    """Keep the certificate of a first winner; certify a replacement by its soak."""
    if not refuted:
        return answer
    changes: tuple[Change, ...] = ()
    if answer.baseline is not None:
        baseline = answer.baseline.candidate
        changes = changes_between(job, baseline, winner.candidate)
    runner_ups = []
    for trial in answer.runner_ups:
        if trial.candidate != winner.candidate:
            runner_ups.append(trial)
    return replace(
        answer,
        winner=winner,
        certificate=certificate,
        refuted=(*answer.refuted, *refuted),
        runner_ups=tuple(runner_ups),
        changes=changes,
        relaxed=relaxed_in(job, winner.candidate),
    )


def _without_winner(answer: Recommendation, refuted: Sequence[Trial]) -> Recommendation:
    return replace(
        answer,
        winner=None,
        certificate=None,
        runner_ups=(),
        changes=(),
        relaxed={},
        refuted=(*answer.refuted, *refuted),
        proven="not proven infeasible",
    )


def _note(listener: Listener, text: str) -> None:
    listener(Note(text=text))

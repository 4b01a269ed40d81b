"""The winner runs for as long as was asked; where it does not hold, the next finalist takes its place, and is soaked too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from autotune.conclude import changes_between, relaxed_in
from autotune.events import Listener, Note
from autotune.executors.base import Executor
from autotune.question import Question
from autotune.recommendation import Recommendation, Trial
from autotune.soak import judge_soak, words_of
from autotune.trainers.base import ProbePlan
from autotune.units import format_seconds
from autotune.verdict import Verdict, judge

GRACE_SECONDS = 600.0
"""Beyond the soak itself: loading, the last cycle, one evaluation and one save."""

MOST = 3
"""So many finalists are soaked before the answer is that none held."""


def soak(question: Question, answer: Recommendation, executor: Executor, listener: Listener, seconds: float) -> Recommendation:
    """The answer with its soak; another winner, or none, where the first did not hold."""
    if answer.winner is None:
        return answer
    plan = ProbePlan(
        optimizer_steps=3, soak_seconds=seconds, save_checkpoint=True, evaluate=True, deadline_seconds=seconds + GRACE_SECONDS
    )
    fell: tuple[Trial, ...] = ()
    with contextlib.closing(executor):
        for finalist in _finalists(answer):
            listener(Note(text=f"Soaking the recommended candidate for {format_seconds(seconds)}, whole cycles at the longest."))
            try:
                trial = _run(finalist, executor, plan)
            except KeyboardInterrupt:
                return replace(answer, interrupted=True)
            found = judge_soak(trial.measurement, projected_steps(question))
            listener(Note(text=words_of(found)))
            answer = replace(answer, soaks=(*answer.soaks, found), probe_seconds=answer.probe_seconds + _seconds(trial, question))
            if found.holds:
                return _with_winner(question, answer, finalist, trial, fell)
            why = Verdict(fits=False, why=f"soaked: {found.why}", margin_bytes=trial.verdict.margin_bytes)
            fell = (*fell, replace(trial, verdict=why))
            listener(Note(text="It does not hold; the next finalist takes its place."))
    return _without_winner(answer, fell)


def projected_steps(question: Question) -> int | None:
    """Optimizer steps of the real run; None where the user's configuration leaves that to the data."""
    workload = question.job.workload
    steps = {**workload.held, **workload.user_settings}.get("max_steps")
    return steps if isinstance(steps, int) and steps > 0 else None


def _finalists(answer: Recommendation) -> Iterator[Trial]:
    assert answer.winner is not None
    yield answer.winner
    yield from [trial for trial in answer.runner_ups if trial.verdict.fits][: MOST - 1]


def _run(finalist: Trial, executor: Executor, plan: ProbePlan) -> Trial:
    measurement = executor.open(finalist.candidate).measure(finalist.candidate, plan)
    return replace(finalist, purpose="confirm", measurement=measurement, verdict=judge(measurement))


def _with_winner(
    question: Question, answer: Recommendation, winner: Trial, trial: Trial, fell: tuple[Trial, ...]
) -> Recommendation:
    """A first winner that held keeps its certificate; one that took its place is certified by its soak."""
    if not fell:
        return answer
    baseline = answer.baseline.candidate if answer.baseline else None
    return replace(
        answer,
        winner=winner,
        certificate=trial,
        refuted=(*answer.refuted, *fell),
        runner_ups=tuple(one for one in answer.runner_ups if one.candidate != winner.candidate),
        changes=() if baseline is None else changes_between(question, baseline, winner.candidate),
        relaxed=relaxed_in(question, winner.candidate),
    )


def _without_winner(answer: Recommendation, fell: tuple[Trial, ...]) -> Recommendation:
    return replace(
        answer, winner=None, certificate=None, runner_ups=(), changes=(), relaxed={}, refuted=(*answer.refuted, *fell),
        proven="not proven infeasible",
    )  # fmt: skip


def _seconds(trial: Trial, question: Question) -> float:
    return trial.measurement.cost.total_seconds * question.job.hardware.count

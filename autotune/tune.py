"""The only loop: ask for a candidate, measure it on a rig, tell what was found; then conclude.

Everything the loop knows is in the study, so a run that was stopped anywhere goes on from there.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autotune.candidate import Candidate
from autotune.conclude import conclude
from autotune.errors import BadInput, RigError
from autotune.events import Listener, Note, ProbeEnded, ProbeStarted, Settled
from autotune.executors.base import Executor
from autotune.measurement import Measurement, Outcome
from autotune.question import Question
from autotune.recommendation import Proven, Recommendation
from autotune.study import Asked, Means, Stop, Study
from autotune.trainers.base import ProbePlan, Trainer

SHORT = ProbePlan(optimizer_steps=2, warmup_cycles=1, timed_cycles=3, reuse_rollouts=True)
"""Enough to know whether a candidate fits, and roughly how fast it is."""

LONG = ProbePlan(optimizer_steps=4, warmup_cycles=1, timed_cycles=5, save_checkpoint=True, evaluate=True)
"""One turn of what the finalists go through before one of them is recommended."""

REACH = 0.95
"""A candidate is stopped early when it can't reach this share of the best in its tier: what comes nearer may be better."""

FAULTS = 2
"""So many faults of the machine in a row end the search."""


def legal_candidates(question: Question, trainer: Trainer) -> tuple[Candidate, ...]:
    """Every distinct candidate of the space that the framework would accept."""
    legal: dict[str, Candidate] = {}
    refusals: Counter[str] = Counter()
    for knobs in question.space.assignments():
        candidate = trainer.complete(knobs, question.job)
        reason = trainer.why_illegal(candidate, question.job)
        if reason is None:
            legal.setdefault(candidate.id, candidate)
        else:
            refusals[reason] += 1
    if not legal:
        common = refusals.most_common(1)[0][0] if refusals else "it has no assignment at all"
        raise BadInput(
            f"The space {question.space.name!r} holds no legal candidate; most often because {common}",
            way_out="Widen it with --search KNOB=V1,V2, or hold fewer values.",
        )
    return tuple(legal.values())


def baseline_candidate(question: Question, trainer: Trainer) -> Candidate | None:
    """The user's own configuration, or the framework's defaults; None where the framework itself refuses it."""
    candidate = trainer.complete(trainer.baseline(question.space, question.job), question.job)
    return candidate if trainer.why_illegal(candidate, question.job) is None else None


@dataclass
class Clock:
    """The budget's wall clock."""

    budget_seconds: float
    now: Callable[[], float] = time.monotonic
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.now()

    @property
    def elapsed(self) -> float:
        return self.now() - self.started

    @property
    def left(self) -> float:
        return max(0.0, self.budget_seconds - self.elapsed)


def tune(question: Question, *, study: Study, executor: Executor, listener: Listener, clock: Clock) -> Recommendation:
    """Search until nothing better is possible or the budget is spent, and conclude from what was measured.

    Ctrl-C ends the search, not the answer: what was measured so far is concluded from, and marked as interrupted.
    """
    listener(
        Settled(
            candidates=study.size,
            budget_seconds=question.budget_seconds,
            max_probes=question.max_probes,
            resumed_trials=len(study.trials),
        )
    )
    proven: Proven | None = None
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(executor):
        proven = _search(question, study, executor, listener, clock)
    return conclude(study.view, question, proven=proven, loads=executor.loads, elapsed_seconds=clock.elapsed)


def _search(question: Question, study: Study, executor: Executor, listener: Listener, clock: Clock) -> Proven:
    faults, live = 0, None
    while not isinstance(asked := study.ask(_means(question, study, clock)), Stop):
        listener(_started(asked, live, clock))
        live = asked.candidate.load_key
        try:
            measurement = _measure(asked, study, executor, clock)
        except RigError as fault:
            faults += 1
            study.tell_fault(asked, str(fault))
            if faults >= FAULTS:
                raise
            listener(Note(text=f"{fault} Trying again."))
            continue
        except BaseException:
            study.tell_fault(asked, "interrupted")
            raise
        faults = 0
        trial = study.tell(asked, measurement)
        listener(ProbeEnded(trial=trial, best=study.view.best(), seconds_left=clock.left))
    return asked.proven


def _measure(asked: Asked, study: Study, executor: Executor, clock: Clock) -> Measurement:
    plan = _plan(asked, study, clock)
    measurement = executor.open(asked.candidate).measure(asked.candidate, plan)
    if measurement.outcome is Outcome.TIMEOUT and plan.deadline_seconds < SHORT.deadline_seconds:
        # The budget ended it, not the candidate: nothing was found out, and a resumed study may try again.
        return replace(measurement, outcome=Outcome.INTERRUPTED)
    return measurement


def _plan(asked: Asked, study: Study, clock: Clock) -> ProbePlan:
    if asked.purpose == "confirm":
        return replace(LONG, deadline_seconds=min(LONG.deadline_seconds, clock.left))
    pruned = study.options.prune and asked.purpose in ("search", "refused")
    rival = study.view.fastest_beside(asked.candidate) if pruned else None
    return replace(
        SHORT,
        deadline_seconds=min(SHORT.deadline_seconds, clock.left),
        stop_below_tokens_per_second=None if rival is None else REACH * rival,
        cycle_spread=max(study.view.cycle_spread() or 0.0, SHORT.cycle_spread),
    )


def _means(question: Question, study: Study, clock: Clock) -> Means:
    return Means(seconds=clock.left, probes=question.max_probes - len(study.view.probes))


def _started(asked: Asked, live: str | None, clock: Clock) -> ProbeStarted:
    return ProbeStarted(
        number=asked.number,
        purpose=asked.purpose,
        candidate=asked.candidate,
        loads=asked.candidate.load_key != live,
        seconds_left=clock.left,
    )

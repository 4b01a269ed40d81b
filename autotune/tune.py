"""The only loop: ask for candidates, measure them on rigs, tell what was found; then conclude.

With one slot that is one after another, with several as many at a time, and it is the same loop. Everything it
knows is in the study, so a run that was stopped anywhere goes on from there.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autotune.candidate import Candidate
from autotune.conclude import conclude
from autotune.disturbance import Disturbance, disturbance_of
from autotune.errors import BadInput, RigError, SlotLost, StorageLost
from autotune.events import Listener, Note, ProbeEnded, ProbeStarted, Settled
from autotune.executors.base import Executor, Slot
from autotune.executors.probing import Ended, Probing
from autotune.measurement import Measurement, Outcome
from autotune.question import Question
from autotune.recommendation import Proven, Recommendation, Trial
from autotune.study import Asked, Means, Stop, Study
from autotune.trainers.base import ProbePlan, Trainer

SHORT = ProbePlan(optimizer_steps=2, warmup_cycles=1, timed_cycles=3, reuse_rollouts=True)
"""Enough to know whether a candidate fits, and roughly how fast it is."""

LONG = ProbePlan(optimizer_steps=4, warmup_cycles=1, timed_cycles=5, save_checkpoint=True, evaluate=True)
"""One turn of what the finalists go through before one of them is recommended."""

REACH = 0.95
"""A candidate is stopped early when it can't reach this share of the best in its tier: what comes nearer may be better."""

FAULTS = 2
"""So many faults of the machine in a row, in one slot, are the end of that slot; that of the last slot ends the search."""

WAIT_SECONDS = 1.0
"""How often the loop looks around while probes run."""


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
        raise _nothing_legal(question.space.name, refusals)
    return tuple(legal.values())


def _nothing_legal(space: str, refusals: Counter[str]) -> BadInput:
    """Where one rule refuses all of them whatever the knobs are, other values of them are no way out: the rule says what is."""
    if len(refusals) == 1 and refusals.total() > 1:
        return BadInput(f"The space {space!r} holds no legal candidate, whatever its knobs are:", way_out=next(iter(refusals)))
    common = refusals.most_common(1)[0][0] if refusals else "it has no assignment at all"
    return BadInput(
        f"The space {space!r} holds no legal candidate; most often because {common}",
        way_out="Widen it with --search KNOB=V1,V2, or hold fewer values.",
    )


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
    study.when_waiting(lambda text: listener(Note(text=text)))
    search = Search(question, study, executor, listener, clock)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(executor):
        proven = search.run()
    answer = conclude(study.view, question, proven=proven, loads=executor.loads, elapsed_seconds=clock.elapsed)
    return replace(answer, disturbance=search.disturbance)


class Search:
    """As many probes at a time as the executor has slots. One thread asks and tells; the others only measure."""

    def __init__(self, question: Question, study: Study, executor: Executor, listener: Listener, clock: Clock) -> None:
        self._question, self._study, self._listener, self._clock = question, study, listener, clock
        self._probes: Probing[Asked | None] = Probing(executor)
        self._pending: dict[int, Asked] = {}
        self._faults: Counter[int] = Counter()
        self.disturbance: Disturbance | None = None
        self._spent = False
        """Whether the budget has ended a probe: what would be begun now would end the same way, for ever."""

    def run(self) -> Proven:
        """Why it ended; RigError where the machine did not let it."""
        try:
            return self._loop()
        except StorageLost:
            self._pending.clear()  # there is nobody left to tell
            raise
        finally:
            self._probes.close()
            self._settle_what_is_left()

    def _loop(self) -> Proven:
        while True:
            stop = self._fill()
            if isinstance(stop, Stop):
                return stop.proven
            ended = self._probes.wait(WAIT_SECONDS)
            if ended is not None:
                self._take(ended)
                continue
            self._study.catch_up()
            if not self._pending and not self._clock.left:
                return "budget spent"  # only others still measure

    def _fill(self) -> Stop | None:
        """A probe into every free slot, as far as there is anything worth starting; a Stop is only said when all is told."""
        while self._probes.has_room:
            if self._spent:
                return None if self._pending else Stop(proven="budget spent")
            asked = self._study.ask(self._means())
            if isinstance(asked, Stop):
                return asked
            if not isinstance(asked, Asked):
                return None
            self._pending[asked.number] = asked
            if asked.purpose == "confirm" and self.disturbance is None:
                self._measure_disturbance()
            loads = self._probes.begin(asked, asked.candidate, self._plan(asked))
            self._listener(
                ProbeStarted(
                    number=asked.number, purpose=asked.purpose, candidate=asked.candidate, loads=loads,
                    seconds_left=self._clock.left,
                )
            )  # fmt: skip
        return None

    def _take(self, ended: Ended[Asked | None]) -> None:
        asked, found = ended.ticket, ended.found
        assert asked is not None
        if isinstance(found, RigError):
            self._hand_back(asked, str(found))
            self._fault(ended.slot, found)
        elif isinstance(found, BaseException):
            self._hand_back(asked, "interrupted")
            raise found
        else:
            self._faults[ended.slot.number] = 0
            measured = _by_the_candidate(replace(found, beside=ended.beside), ended.plan)
            self._tell(asked, measured)
            self._spent = measured.outcome is Outcome.INTERRUPTED and not self._clock.left

    def _tell(self, asked: Asked, measurement: Measurement) -> None:
        trial = self._study.tell(asked, measurement)
        del self._pending[asked.number]
        self._listener(ProbeEnded(trial=trial, best=self._study.view.best(), seconds_left=self._clock.left))

    def _hand_back(self, asked: Asked, why: str) -> None:
        self._study.tell_fault(asked, why)
        del self._pending[asked.number]

    def _fault(self, slot: Slot, fault: RigError) -> None:
        """The machine failed, not the candidate: again, elsewhere where this slot does no better; never for ever."""
        self._faults[slot.number] += 1
        if not isinstance(fault, SlotLost) and self._faults[slot.number] < FAULTS:
            self._listener(Note(text=f"{fault} Trying again."))
            return
        self._probes.retire(slot)
        if not self._probes.width:
            raise fault
        self._listener(Note(text=f"{fault} Going on without {slot.words}; {self._probes.width} slots are left."))

    def _settle_what_is_left(self) -> None:
        """After an interruption: what was measured by then is kept, and the rest is open again."""
        with contextlib.suppress(StorageLost):
            while self._pending and (ended := self._probes.wait(0.0)) is not None:
                if isinstance(ended.found, Measurement) and ended.ticket is not None:
                    self._tell(ended.ticket, _by_the_candidate(replace(ended.found, beside=ended.beside), ended.plan))
            for asked in list(self._pending.values()):
                self._hand_back(asked, "interrupted")
            self._study.leave()

    def _measure_disturbance(self) -> None:
        """Before the first finalist is confirmed, with nothing else running: one probe again, alone."""
        known = [trial for trial in self._study.trials if trial.measurement.beside and _shows_speed(trial)]
        spare = 4 * self._study.view.usual_seconds(load=True)
        if not known or self._clock.left < spare:
            return
        # What was chosen for its speed was measured luckily; the first ones were not chosen.
        crowded = max(known, key=lambda trial: (trial.measurement.beside or 0, -trial.number))
        self._listener(Note(text="Measuring again alone what ran beside other probes, to see how much they disturb each other."))
        alone = self._alone(crowded.candidate)
        self.disturbance = None if alone is None else disturbance_of(alone, crowded.measurement)

    def _alone(self, candidate: Candidate) -> Measurement | None:
        plan = replace(SHORT, reuse_rollouts=False, deadline_seconds=min(SHORT.deadline_seconds, self._clock.left))
        self._probes.begin(None, candidate, plan)  # nobody's: the study is not told of it
        while (ended := self._probes.wait(WAIT_SECONDS)) is None:
            self._study.catch_up()
        if isinstance(ended.found, BaseException) and not isinstance(ended.found, RigError):
            raise ended.found
        return ended.found if isinstance(ended.found, Measurement) else None

    def _plan(self, asked: Asked) -> ProbePlan:
        clock, seen = self._clock, self._study.view
        if asked.purpose == "confirm":
            return replace(LONG, deadline_seconds=min(LONG.deadline_seconds, clock.left))
        pruned = self._study.options.prune and asked.purpose in ("search", "refused")
        rival = seen.fastest_beside(asked.candidate) if pruned else None
        return replace(
            SHORT,
            deadline_seconds=min(SHORT.deadline_seconds, clock.left),
            stop_below_tokens_per_second=None if rival is None else REACH * rival,
            cycle_spread=max(seen.cycle_spread() or 0.0, SHORT.cycle_spread),
        )

    def _means(self) -> Means:
        left = self._question.max_probes - len(self._study.view.probes)
        return Means(seconds=self._clock.left, probes=left, live=self._probes.live)


def _by_the_candidate(measurement: Measurement, plan: ProbePlan) -> Measurement:
    if measurement.outcome is Outcome.TIMEOUT and plan.deadline_seconds < SHORT.deadline_seconds:
        # The budget ended it, not the candidate: nothing was found out, and a resumed study may try again.
        return replace(measurement, outcome=Outcome.INTERRUPTED)
    return measurement


def _shows_speed(trial: Trial) -> bool:
    speed = trial.measurement.worst
    return trial.purpose != "confirm" and trial.verdict.fits and speed is not None and not speed.cut_short

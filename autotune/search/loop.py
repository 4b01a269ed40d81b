"""Search loop: ask the study for candidates, measure them in the executor's slots, tell it the
results, and conclude.

All state is in the study, so an interrupted run continues at the same point.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autotune.core.answer import Proven, Recommendation
from autotune.core.errors import BadInput, ProbeError, SlotLost, StorageLost
from autotune.core.events import CandidatesPruned, Listener, Note, ProbeEnded, ProbeStarted
from autotune.core.files import describe_full_disk
from autotune.core.job import Job
from autotune.core.measurement import Measurement, Outcome, ProbePlan
from autotune.core.run_statistics import Disturbance, measure_interference
from autotune.core.space import Candidate
from autotune.frameworks.base import Trainer
from autotune.machine.signals import stop_requested, uninterrupted
from autotune.probe.executors.base import Executor
from autotune.probe.executors.concurrent_probes import ConcurrentProbes, FinishedProbe
from autotune.search.agenda import RemainingBudget, SearchEnd
from autotune.search.conclusion import conclude
from autotune.search.study import Study, TrialRequest
from autotune.search.surrogate.throughput_model import median_scatter
from autotune.search.trial_view import speed_of

# Probe that decides fit and estimates the speed; probe of one confirmation round.
SHORT_PROBE = ProbePlan(optimizer_steps=2, warmup_cycles=1, timed_cycles=3, reuse_rollouts=True)
LONG_PROBE = ProbePlan(optimizer_steps=4, warmup_cycles=1, timed_cycles=5, save_checkpoint=True, evaluate=True)
EMULATED_DEADLINE_S = 1800.0  # Wall seconds of a probe on emulated cards: few cores compile what a GPU machine's many do
PRUNE_SHARE = 0.95  # Share of the tier's best speed below which a probe is stopped early. A closer one may turn out better.
MAX_SLOT_FAULTS = 2  # Consecutive machine faults after which a slot is retired. The last slot's end ends the search.
WAIT_SECONDS = 1.0  # Poll interval of the loop while probes run


def legal_candidates(job: Job, trainer: Trainer) -> tuple[Candidate, ...]:
    """Return every distinct candidate of the space that the framework accepts."""
    legal: dict[str, Candidate] = {}
    refusals: Counter[str] = Counter()
    for knobs in job.space.assignments():
        candidate = trainer.complete(knobs, job.task)
        reason = trainer.why_illegal(candidate, job.task)
        if reason is None:
            legal.setdefault(candidate.id, candidate)
        else:
            refusals[reason] += 1
    if legal:
        return tuple(legal.values())
    what = f"The space {job.space.name!r} holds no legal candidate"
    if len(refusals) == 1 and refusals.total() > 1:  # the text of the rule that rejects every candidate is the way out
        raise BadInput(f"{what}:", way_out=next(iter(refusals)))
    common = refusals.most_common(1)[0][0] if refusals else "it has no assignment at all"
    raise BadInput(f"{what}; most often because {common}", way_out="Widen it with --search KNOB=V1,V2, or hold fewer values.")


def baseline_candidate(job: Job, trainer: Trainer) -> Candidate | None:
    """Return the user's own configuration, or the framework's defaults; None if the framework rejects it."""
    candidate = trainer.complete(trainer.baseline(job.space, job.task), job.task)
    return candidate if trainer.why_illegal(candidate, job.task) is None else None


@dataclass
class Clock:
    """Wall clock of the budget."""

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


def run_search(job: Job, *, study: Study, executor: Executor, listener: Listener, clock: Clock) -> Recommendation:
    """Measure until no better candidate is possible or the budget is spent, and return the conclusion. That of a search which
    Ctrl-C or a fault of the machine ended is marked as such."""
    legal = sum(len(tier.candidates) for tier in study.agenda.problem.tiers)
    listener(
        CandidatesPruned(
            candidates=legal, budget_seconds=clock.budget_seconds, max_probes=job.max_probes, resumed_trials=len(study.trials)
        )
    )
    proven: Proven | None = None
    fault: str | None = None
    study.retry.notify = lambda text: listener(Note(text=text))
    search = Search(job, study, executor, listener, clock)
    try:
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(executor):
            proven = search.run()
    except (StorageLost, ProbeError, OSError) as error:
        if not stop_requested():  # after Ctrl-C, a database that does not answer changes nothing
            fault = describe_full_disk(error) if isinstance(error, OSError) else str(error)
            if fault is None or not study.trials:
                raise
    answer = conclude(study.view, job, proven=proven, loads=executor.loads, elapsed_seconds=clock.elapsed)
    answer = replace(answer, disturbance=search.disturbance, fault=fault)
    return answer if fault is None else replace(answer, proven="stopped by a fault")


class Search:
    """Concurrent probes, one per slot. One thread talks to the study; a thread per slot measures."""

    def __init__(self, job: Job, study: Study, executor: Executor, listener: Listener, clock: Clock) -> None:
        self._job, self._study, self._listener, self._clock = job, study, listener, clock
        self._probes: ConcurrentProbes[TrialRequest | None] = ConcurrentProbes(executor)
        self._pending: dict[int, TrialRequest] = {}
        self._faults: Counter[int] = Counter()
        self.disturbance: Disturbance | None = None
        self._budget_ended_probe = False
        """True once the budget ended a probe: any further probe would end the same way."""

    def run(self) -> Proven:
        """Return the reason of the end; ProbeError if the machine prevented the search."""
        try:
            while (proven := self._fill_slots()) is None:
                finished = self._probes.wait(WAIT_SECONDS)
                if finished is not None:
                    self._process(finished)
                    continue
                self._study.catch_up()
                if not self._pending and not self._clock.left:
                    return "budget spent"  # other drivers are still measuring
            return proven
        except StorageLost:
            self._pending.clear()  # they can't be recorded any more
            raise
        finally:
            self._probes.close()
            self._record_remaining()

    def _fill_slots(self) -> Proven | None:
        """Start a probe in every free slot; return the reason of the search's end once nothing is pending."""
        while self._probes.has_room:
            if self._budget_ended_probe:
                return None if self._pending else "budget spent"
            probes = self._job.max_probes - len(self._study.view.probes)
            request = self._study.ask(RemainingBudget(seconds=self._clock.left, probes=probes, live=self._probes.live))
            if isinstance(request, SearchEnd):
                return request.proven
            if not isinstance(request, TrialRequest):
                return None
            self._pending[request.number] = request
            if request.purpose == "confirm" and self.disturbance is None:
                self._measure_disturbance()
            loads = self._probes.begin(request, request.candidate, self._plan(request))
            self._listener(
                ProbeStarted(
                    number=request.number, purpose=request.purpose, candidate=request.candidate, loads=loads,
                    seconds_left=self._clock.left,
                )
            )  # fmt: skip
        return None

    def _process(self, finished: FinishedProbe[TrialRequest | None]) -> None:
        request, found = finished.ticket, finished.found
        assert request is not None
        if isinstance(found, Measurement):
            self._faults[finished.slot.number] = 0
            outcome = self._tell(request, found, finished)
            self._budget_ended_probe = outcome is Outcome.INTERRUPTED and not self._clock.left
            return
        if not isinstance(found, ProbeError):
            self._return(request, "interrupted")
            raise found
        self._return(request, str(found))
        # Continue after a fault of the machine; retire the slot after repeated ones.
        slot = finished.slot
        self._faults[slot.number] += 1
        if not isinstance(found, SlotLost) and self._faults[slot.number] < MAX_SLOT_FAULTS:
            self._listener(Note(text=f"{found} Trying again."))
            return
        self._probes.retire(slot)
        if not self._probes.width:
            raise found
        self._listener(Note(text=f"{found} Going on without {slot.words}; {self._probes.width} slots are left."))

    def _tell(self, request: TrialRequest, found: Measurement, finished: FinishedProbe[TrialRequest | None]) -> Outcome:
        """Record the measurement and return its outcome."""
        measurement = replace(found, beside=finished.beside)
        if measurement.outcome is Outcome.TIMEOUT and finished.plan.deadline_seconds < self._deadline_seconds:
            # Ended by the budget: it is no result, and a resumed study may repeat it.
            measurement = replace(measurement, outcome=Outcome.INTERRUPTED)
        with uninterrupted():
            trial = self._study.tell(request, measurement)
            del self._pending[request.number]
        self._listener(ProbeEnded(trial=trial, best=self._study.view.best(), seconds_left=self._clock.left))
        return measurement.outcome

    def _return(self, request: TrialRequest, why: str) -> None:
        with uninterrupted():
            self._study.tell_fault(request, why)
            del self._pending[request.number]

    def _record_remaining(self) -> None:
        """Record finished measurements after an interruption; the other candidates are open again."""
        with contextlib.suppress(StorageLost):
            while self._pending and (finished := self._probes.wait(0.0)) is not None:
                if isinstance(finished.found, Measurement) and finished.ticket is not None:
                    self._tell(finished.ticket, finished.found, finished)
            for request in list(self._pending.values()):
                self._return(request, "interrupted")
            self._study.leave()

    def _measure_disturbance(self) -> None:
        """Repeat one probe alone, before the first confirmation, to measure the interference of concurrent probes."""
        known = [
            trial
            for trial in self._study.trials
            if trial.measurement.beside and trial.purpose != "confirm" and trial.verdict.fits
            and (speed := trial.measurement.worst) is not None and not speed.cut_short
        ]  # fmt: skip
        if not known or self._clock.left < 4 * self._study.view.usual_seconds(load=True):
            return
        # Among equals the earliest: later ones were selected for their speed, so their measurement is biased upwards.
        crowded = max(known, key=lambda trial: (trial.measurement.beside or 0, -trial.number))
        self._listener(Note(text="Measuring one candidate again alone, to see how much concurrent probes disturb each other."))
        plan = replace(SHORT_PROBE, reuse_rollouts=False, deadline_seconds=min(self._deadline_seconds, self._clock.left))
        self._probes.begin(None, crowded.candidate, plan)  # not a trial of the study
        while (finished := self._probes.wait(WAIT_SECONDS)) is None:
            self._study.catch_up()
        if isinstance(alone := finished.found, Measurement):
            self.disturbance = measure_interference(alone, crowded.measurement)
        elif not isinstance(alone, ProbeError):
            raise alone

    @property
    def _deadline_seconds(self) -> float:
        return EMULATED_DEADLINE_S if self._job.task.hardware.emulated else SHORT_PROBE.deadline_seconds

    def _plan(self, request: TrialRequest) -> ProbePlan:
        clock, view = self._clock, self._study.view
        if request.purpose == "confirm":
            return replace(LONG_PROBE, deadline_seconds=min(LONG_PROBE.deadline_seconds, clock.left))
        pruned = self._study.agenda.options.prune and request.purpose in ("search", "refused")
        rivals = view.same_tier_contenders(request.candidate) if pruned else []
        return replace(
            SHORT_PROBE,
            deadline_seconds=min(self._deadline_seconds, clock.left),
            stop_below_tokens_per_second=PRUNE_SHARE * speed_of(rivals[0]) if rivals else None,
            cycle_spread=max(median_scatter(view.completed) or 0.0, SHORT_PROBE.cycle_spread),
        )

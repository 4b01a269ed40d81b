"""Search loop: ask the study for candidates, measure them in the executor's slots, tell it the
results, and conclude.

All state is in the study, so an interrupted run continues at the same point.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace

from autotune.catalog import efficiency
from autotune.core.answer import Proven, Recommendation
from autotune.core.errors import BadInput, ProbeError, SlotLost, StorageLost
from autotune.core.events import CandidatesPruned, Listener, Note, ProbeEnded, ProbeStarted
from autotune.core.files import describe_full_disk
from autotune.core.job import Job
from autotune.core.measurement import Measurement, Outcome, ProbePlan
from autotune.core.prediction import Estimate, Prediction
from autotune.core.run_statistics import Disturbance, measure_interference
from autotune.core.space import Candidate
from autotune.core.units import format_seconds
from autotune.frameworks.base import Trainer
from autotune.machine.signals import stop_requested, uninterrupted
from autotune.probe.executors.base import ConcurrentProbes, Executor, SlotProbe
from autotune.search.agenda import RemainingBudget, SearchEnd
from autotune.search.conclusion import conclude
from autotune.search.study import Study, TrialRequest
from autotune.search.surrogate.throughput_model import median_scatter
from autotune.search.trial_view import speed_of

# Probe that decides fit and estimates the speed; probe of one confirmation round.
SHORT_PROBE = ProbePlan(optimizer_steps=2, warmup_cycles=1, timed_cycles=3, reuse_rollouts=True)
LONG_PROBE = ProbePlan(
    optimizer_steps=4, warmup_cycles=1, timed_cycles=5, save_checkpoint=True, evaluate=True
)
# Wall seconds of a probe on emulated cards: few cores compile what a GPU machine's many do
EMULATED_DEADLINE_S = 1800.0
# Share of the tier's best speed below which a probe is stopped early. A closer one may turn out
# better.
PRUNE_SHARE = 0.95
# Consecutive machine faults after which a slot is retired. The last slot's end ends the search.
MAX_SLOT_FAULTS = 2
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
    if (
        len(refusals) == 1 and refusals.total() > 1
    ):  # the text of the rule that rejects every candidate is the way out
        raise BadInput(f"{what}:", way_out=next(iter(refusals)))
    common = refusals.most_common(1)[0][0] if refusals else "it has no assignment at all"
    raise BadInput(
        f"{what}; most often because {common}",
        way_out="Widen it with --search KNOB=V1,V2, or hold fewer values.",
    )


def baseline_candidate(job: Job, trainer: Trainer) -> Candidate | None:
    """Return the user's own configuration, or the framework's defaults; None if the framework
    rejects it.
    """
    candidate = trainer.complete(trainer.baseline(job.space, job.task), job.task)
    return candidate if trainer.why_illegal(candidate, job.task) is None else None


class Clock:
    def __init__(self, budget_seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.budget_seconds, self.now, self.started = budget_seconds, now, now()

    @property
    def elapsed(self) -> float:
        return self.now() - self.started

    @property
    def left(self) -> float:
        return max(0.0, self.budget_seconds - self.elapsed)


def run_search(
    job: Job, *, study: Study, executor: Executor, listener: Listener, clock: Clock
) -> Recommendation:
    """Measure until no better candidate is possible or the budget is spent, and return the
    conclusion. That of a search which Ctrl-C or a fault of the machine ended is marked as such.
    """
    legal = sum(len(tier.candidates) for tier in study.problem.tiers)
    listener(
        CandidatesPruned(
            candidates=legal,
            budget_seconds=clock.budget_seconds,
            max_probes=job.max_probes,
            resumed_trials=len(study.trials),
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
    answer = conclude(
        study.view, job, proven=proven, loads=executor.loads, elapsed_seconds=clock.elapsed
    )
    answer = replace(answer, disturbance=search.disturbance, fault=fault)
    return answer if fault is None else replace(answer, proven="stopped by a fault")


class Search:
    """Concurrent probes, one per slot. One thread talks to the study; a thread per slot
    measures.
    """

    def __init__(
        self, job: Job, study: Study, executor: Executor, listener: Listener, clock: Clock
    ) -> None:
        self._job, self._study, self._listener, self._clock = job, study, listener, clock
        self._probes: ConcurrentProbes[TrialRequest | None] = ConcurrentProbes(executor)
        self._faults: Counter[int] = Counter()
        self.disturbance: Disturbance | None = None
        self._recordable = True  # False once the database was lost
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
                if not self._study.open and not self._clock.left:
                    return "budget spent"  # other drivers are still measuring
            return proven
        except StorageLost:
            self._recordable = False
            raise
        finally:
            self._probes.close()
            self._record_remaining()

    def _fill_slots(self) -> Proven | None:
        """Start a probe in every free slot; return the reason of the search's end once nothing
        is pending.
        """
        while self._probes.has_room:
            if self._budget_ended_probe:
                return None if self._study.open else "budget spent"
            probes = self._job.max_probes - len(self._study.view.probes)
            request = self._study.ask(
                RemainingBudget(seconds=self._clock.left, probes=probes, live=self._probes.live)
            )
            if isinstance(request, SearchEnd):
                return request.proven
            if not isinstance(request, TrialRequest):
                return None
            if request.purpose == "confirm" and self.disturbance is None:
                self._measure_disturbance()
            loads = self._probes.begin(request, request.candidate, self._plan(request))
            self._listener(
                ProbeStarted(
                    number=request.number,
                    purpose=request.purpose,
                    candidate=request.candidate,
                    loads=loads,
                    seconds_left=self._clock.left,
                )
            )
        return None

    def _process(self, finished: SlotProbe[TrialRequest | None]) -> None:
        request, found = finished.ticket, finished.result
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
        self._listener(
            Note(
                text=f"{found} Going on without {slot.words}; {self._probes.width} slots are left."
            )
        )

    def _tell(
        self, request: TrialRequest, found: Measurement, finished: SlotProbe[TrialRequest | None]
    ) -> Outcome:
        """Record the measurement and return its outcome."""
        measurement = replace(found, beside=finished.beside)
        if (
            measurement.outcome is Outcome.TIMEOUT
            and finished.plan.deadline_seconds < self._deadline_seconds
        ):
            # Ended by the budget: it is no result, and a resumed study may repeat it.
            measurement = replace(measurement, outcome=Outcome.INTERRUPTED)
        with uninterrupted():
            trial = self._study.tell(request, measurement)
        self._listener(
            ProbeEnded(trial=trial, best=self._study.view.best(), seconds_left=self._clock.left)
        )
        return measurement.outcome

    def _return(self, request: TrialRequest, why: str) -> None:
        with uninterrupted():
            self._study.tell_fault(request, why)

    def _record_remaining(self) -> None:
        """Record finished measurements after an interruption; the other candidates are open
        again.
        """
        with contextlib.suppress(StorageLost):
            remaining = self._study.open if self._recordable else {}
            while remaining and (finished := self._probes.wait(0.0)) is not None:
                if isinstance(finished.result, Measurement) and finished.ticket is not None:
                    self._tell(finished.ticket, finished.result, finished)
            for request in list(remaining.values()):
                self._return(request, "interrupted")
            self._study.leave()

    def _measure_disturbance(self) -> None:
        """Repeat one probe alone, before the first confirmation, to measure the interference of
        concurrent probes.
        """
        known = [
            trial
            for trial in self._study.trials
            if trial.measurement.beside
            and trial.purpose != "confirm"
            and trial.verdict.fits
            and (speed := trial.measurement.worst) is not None
            and not speed.cut_short
        ]
        if not known or self._clock.left < 4 * self._study.view.usual_seconds(load=True):
            return
        # Among equals the earliest: later ones were selected for their speed, so their measurement
        # is biased upwards.
        crowded = max(known, key=lambda trial: (trial.measurement.beside or 0, -trial.number))
        self._listener(
            Note(
                text=(
                    "Measuring one candidate again alone, to see how much concurrent probes disturb"
                    " each other."
                )
            )
        )
        plan = replace(
            SHORT_PROBE,
            reuse_rollouts=False,
            deadline_seconds=min(self._deadline_seconds, self._clock.left),
        )
        self._probes.begin(None, crowded.candidate, plan)  # not a trial of the study
        while (finished := self._probes.wait(WAIT_SECONDS)) is None:
            self._study.catch_up()
        if isinstance(alone := finished.result, Measurement):
            self.disturbance = measure_interference(alone, crowded.measurement)
        elif not isinstance(alone, ProbeError):
            raise alone

    @property
    def _deadline_seconds(self) -> float:
        return (
            EMULATED_DEADLINE_S
            if self._job.task.hardware.emulated
            else SHORT_PROBE.deadline_seconds
        )

    def _plan(self, request: TrialRequest) -> ProbePlan:
        clock, view = self._clock, self._study.view
        if request.purpose == "confirm":
            return replace(
                LONG_PROBE, deadline_seconds=min(LONG_PROBE.deadline_seconds, clock.left)
            )
        pruned = self._study.problem.surrogate.options.prune and request.purpose in (
            "search",
            "refused",
        )
        rivals = view.same_tier_contenders(request.candidate) if pruned else []
        return replace(
            SHORT_PROBE,
            deadline_seconds=min(self._deadline_seconds, clock.left),
            stop_below_tokens_per_second=PRUNE_SHARE * speed_of(rivals[0]) if rivals else None,
            cycle_spread=max(median_scatter(view.completed) or 0.0, SHORT_PROBE.cycle_spread),
        )


SHORT_PROBES, LONG_PROBES = 10, 3
"""Probes after which a search is near its optimum, and confirmations
(benchmarks/results/search.md).
"""


@dataclass(frozen=True, kw_only=True)
class ProbeCost:
    """Seconds of one short and of one long probe of the median candidate that may fit."""

    short: Estimate
    long: Estimate

    @property
    def search_seconds(self) -> float:
        """Seconds of a search of usual length."""
        return SHORT_PROBES * self.short.value + LONG_PROBES * self.long.value

    def text(self, budget_seconds: float) -> str:
        """Return the cost in words, and how many probes the budget pays."""
        low, middle, high = (
            format_seconds(each) for each in (self.short.low, self.short.value, self.short.high)
        )
        probes = max(0, int((budget_seconds - LONG_PROBES * self.long.value) / self.short.value))
        return (
            f"A probe is predicted to take {middle} ({low} to {high}); a budget of"
            f" {format_seconds(budget_seconds)} pays about {probes} of them and {LONG_PROBES}"
            " longer ones."
        )


def probe_cost(predictions: Iterable[Prediction]) -> ProbeCost | None:
    """Return the expected cost; None if no speed is predicted."""
    costs = [
        ProbeCost(short=_seconds(cycle, SHORT_PROBE, one), long=_seconds(cycle, LONG_PROBE, one))
        for one in predictions
        if one.fits is not False and (cycle := _cycle(one)) is not None
    ]
    return (
        sorted(costs, key=lambda cost: (astuple(cost.short), astuple(cost.long)))[len(costs) // 2]
        if costs
        else None
    )


def _cycle(one: Prediction) -> Estimate | None:
    """Return the seconds of a cycle at the longest lengths, at which probes measure."""
    known = [phase.seconds for phase in one.phases if phase.seconds is not None]
    return sum(known, start=Estimate.exactly(0)) if known else None


def _seconds(cycle: Estimate, plan: ProbePlan, one: Prediction) -> Estimate:
    started = efficiency("worker_start_seconds")
    engine = efficiency("engine_start_seconds") if one.engine is not None else Estimate.exactly(0)
    return (started + engine + cycle.scaled(plan.warmup_cycles + plan.timed_cycles)).at_most(
        plan.deadline_seconds
    )

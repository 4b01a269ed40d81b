"""Search loop: ask the study for candidates, measure them in the executor's slots, tell it the
results, and conclude.

All state is in the study, so an interrupted run continues at the same point.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from autotune.core.answer import Proven, Recommendation, Trial
from autotune.core.errors import ProbeError, SlotLost, StorageLost
from autotune.core.events import CandidatesPruned, Listener, Note, ProbeEnded, ProbeStarted
from autotune.core.files import describe_full_disk
from autotune.core.job import Job
from autotune.core.measurement import Measurement, Outcome, ProbePlan
from autotune.core.run_statistics import Disturbance, measure_interference
from autotune.machine.signals import stop_requested, uninterrupted
from autotune.probe.executors.base import ConcurrentProbes, Executor, Slot, SlotProbe
from autotune.search.agenda import RemainingBudget, SearchEnd
from autotune.search.conclusion import conclude
from autotune.search.objective import plan_of
from autotune.search.probe_cost import LONG_PROBE as LONG_PROBE
from autotune.search.probe_cost import SHORT_PROBE as SHORT_PROBE
from autotune.search.problem import baseline_candidate as baseline_candidate
from autotune.search.problem import legal_candidates as legal_candidates
from autotune.search.study import Study, TrialRequest

# Wall seconds of a probe on emulated cards: few cores compile what a GPU machine's many do
EMULATED_DEADLINE_S = 1800.0
# Consecutive machine faults after which a slot is retired. The last slot's end ends the search.
MAX_SLOT_FAULTS = 2
WAIT_SECONDS = 1.0  # Poll interval of the loop while probes run
# Usual probes that must be left in the budget for measuring the interference of concurrent probes
MIN_PROBES_FOR_DISTURBANCE = 4


class Clock:
    def __init__(self, budget_seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.budget_seconds = budget_seconds
        self.now = now
        self.started = now()

    @property
    def elapsed(self) -> float:
        return self.now() - self.started

    @property
    def left(self) -> float:
        seconds = self.budget_seconds - self.elapsed
        return max(0.0, seconds)


def run_search(
    job: Job,
    *,
    study: Study,
    executor: Executor,
    listener: Listener,
    clock: Clock,
) -> Recommendation:
    """Measure until no better candidate is possible or the budget is spent, and return the
    conclusion. That of a search which Ctrl-C or a fault of the machine ended is marked as such.
    """
    # 1. Announce the search.
    counts = [len(tier.candidates) for tier in study.problem.tiers]
    event = CandidatesPruned(
        candidates=sum(counts),
        budget_seconds=clock.budget_seconds,
        max_probes=job.max_probes,
        resumed_trials=len(study.trials),
    )
    listener(event)
    study.retry.notify = lambda text: listener(Note(text=text))

    # 2. Search. After Ctrl-C `proven` is None.
    search = Search(job, study, executor, listener, clock)
    proven: Proven | None = None
    fault: str | None = None
    try:
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(executor):
            proven = search.run()
    except (StorageLost, ProbeError, OSError) as error:
        if not stop_requested():  # after Ctrl-C, a database that does not answer changes nothing
            fault = str(error)
            if isinstance(error, OSError):
                fault = describe_full_disk(error)
            if fault is None or not study.trials:
                raise

    # 3. Conclude.
    answer = conclude(
        study.view,
        job,
        proven=proven,
        loads=executor.loads,
        elapsed_seconds=clock.elapsed,
    )
    answer = replace(answer, disturbance=search.disturbance, fault=fault)
    if fault is None:
        return answer
    return replace(answer, proven="stopped by a fault")


class Search:
    """Concurrent probes, one per slot. One thread talks to the study; a thread per slot
    measures.
    """

    def __init__(
        self,
        job: Job,
        study: Study,
        executor: Executor,
        listener: Listener,
        clock: Clock,
    ) -> None:
        self._job = job
        self._study = study
        self._listener = listener
        self._clock = clock
        # The request of each probe; None for a probe that is not a trial of the study
        self._probes: ConcurrentProbes[TrialRequest | None] = ConcurrentProbes(executor)
        self._faults: Counter[int] = Counter()  # By slot, since its last measurement
        self.disturbance: Disturbance | None = None
        self._recordable = True  # False once the database was lost
        self._budget_ended_probe = False
        """True once the budget ended a probe: any further probe would end the same way."""

    def run(self) -> Proven:
        """Return the reason of the end; ProbeError if the machine prevented the search."""
        try:
            while True:
                proven = self._fill_slots()
                if proven is not None:
                    return proven
                finished = self._probes.wait(WAIT_SECONDS)
                if finished is not None:
                    self._process(finished)
                    continue
                self._study.catch_up()
                if not self._study.open and not self._clock.left:
                    return "budget spent"  # other drivers are still measuring
        except StorageLost:
            self._recordable = False
            raise
        finally:
            self._probes.close()
            self._record_remaining()

    # 1. Start probes.

    def _fill_slots(self) -> Proven | None:
        """Start a probe in every free slot; return the reason of the search's end once nothing
        is pending.
        """
        while self._probes.has_room:
            if self._budget_ended_probe:
                return None if self._study.open else "budget spent"
            probed = len(self._study.view.probes)
            budget = RemainingBudget(
                seconds=self._clock.left,
                probes=self._job.max_probes - probed,
                live=self._probes.live,
            )
            request = self._study.ask(budget)
            if isinstance(request, SearchEnd):
                return request.proven
            if not isinstance(request, TrialRequest):
                return None
            self._start(request)
        return None

    def _start(self, request: TrialRequest) -> None:
        if request.purpose == "confirm" and self.disturbance is None:
            self._measure_disturbance()
        plan = self._plan(request)
        loads = self._probes.begin(request, request.candidate, plan)
        event = ProbeStarted(
            number=request.number,
            purpose=request.purpose,
            candidate=request.candidate,
            loads=loads,
            seconds_left=self._clock.left,
        )
        self._listener(event)

    def _plan(self, request: TrialRequest) -> ProbePlan:
        plan = plan_of(request.purpose, request.candidate, self._study.view)
        seconds = LONG_PROBE.deadline_seconds
        if request.purpose != "confirm":
            seconds = self._deadline_seconds
        return replace(plan, deadline_seconds=min(seconds, self._clock.left))

    @property
    def _deadline_seconds(self) -> float:
        if self._job.task.hardware.emulated:
            return EMULATED_DEADLINE_S
        return SHORT_PROBE.deadline_seconds

    # 2. Record their results.

    def _process(self, finished: SlotProbe[TrialRequest | None]) -> None:
        request = finished.ticket
        result = finished.result
        assert request is not None
        if isinstance(result, Measurement):
            self._faults[finished.slot.number] = 0
            outcome = self._tell(request, result, finished)
            is_interrupted = outcome is Outcome.INTERRUPTED
            self._budget_ended_probe = is_interrupted and not self._clock.left
        elif isinstance(result, ProbeError):
            self._return(request, str(result))
            self._continue_after(result, finished.slot)
        else:
            self._return(request, "interrupted")
            raise result

    def _tell(
        self,
        request: TrialRequest,
        measurement: Measurement,
        finished: SlotProbe[TrialRequest | None],
    ) -> Outcome:
        """Record the measurement and return its outcome."""
        measurement = replace(measurement, beside=finished.beside)
        budget_ended_it = finished.plan.deadline_seconds < self._deadline_seconds
        if measurement.outcome is Outcome.TIMEOUT and budget_ended_it:
            # It is no result, and a resumed study may repeat it.
            measurement = replace(measurement, outcome=Outcome.INTERRUPTED)
        with uninterrupted():
            trial = self._study.tell(request, measurement)
        best = self._study.view.best()
        self._listener(
            ProbeEnded(
                trial=trial,
                best=best,
                seconds_left=self._clock.left,
            )
        )
        return measurement.outcome

    def _return(self, request: TrialRequest, why: str) -> None:
        with uninterrupted():
            self._study.tell_fault(request, why)

    def _continue_after(self, fault: ProbeError, slot: Slot) -> None:
        """Continue after a fault of the machine; retire the slot after repeated ones."""
        self._faults[slot.number] += 1
        faults = self._faults[slot.number]
        if not isinstance(fault, SlotLost) and faults < MAX_SLOT_FAULTS:
            self._note(f"{fault} Trying again.")
            return
        self._probes.retire(slot)
        if not self._probes.width:
            raise fault
        self._note(f"{fault} Going on without {slot.label}; {self._probes.width} slots are left.")

    def _record_remaining(self) -> None:
        """Record finished measurements after an interruption; the other candidates are open
        again.
        """
        with contextlib.suppress(StorageLost):
            remaining = self._study.open if self._recordable else {}
            while remaining:
                finished = self._probes.wait(0.0)
                if finished is None:
                    break
                if isinstance(finished.result, Measurement) and finished.ticket is not None:
                    self._tell(finished.ticket, finished.result, finished)
            for request in list(remaining.values()):
                self._return(request, "interrupted")
            self._study.leave()

    # 3. Interference of concurrent probes.

    def _measure_disturbance(self) -> None:
        """Repeat one probe alone, before the first confirmation, to measure the interference of
        concurrent probes.
        """
        crowded = self._most_crowded()
        usual_seconds = self._study.view.usual_seconds(load=True)
        needed_seconds = MIN_PROBES_FOR_DISTURBANCE * usual_seconds
        if crowded is None or self._clock.left < needed_seconds:
            return
        self._note(
            "Measuring one candidate again alone, to see how much concurrent probes disturb"
            " each other."
        )
        seconds = min(self._deadline_seconds, self._clock.left)
        plan = replace(
            SHORT_PROBE,
            reuse_rollouts=False,
            deadline_seconds=seconds,
        )
        self._probes.begin(None, crowded.candidate, plan)  # not a trial of the study
        while (finished := self._probes.wait(WAIT_SECONDS)) is None:
            self._study.catch_up()
        result = finished.result
        if isinstance(result, Measurement):
            self.disturbance = measure_interference(result, crowded.measurement)
        elif not isinstance(result, ProbeError):
            raise result

    def _most_crowded(self) -> Trial | None:
        """Return the whole probe with most concurrent ones. Among equals the earliest: later ones
        were selected for their speed, so their measurement is biased upwards.
        """
        crowded = []
        for trial in self._study.trials:
            speed = trial.measurement.worst
            if speed is None or speed.cut_short or not trial.verdict.fits:
                continue
            if trial.measurement.beside and trial.purpose != "confirm":
                crowded.append(trial)

        def order(trial: Trial) -> tuple[int, int]:
            neighbours = trial.measurement.beside or 0
            return neighbours, -trial.number

        return max(crowded, key=order, default=None)

    def _note(self, text: str) -> None:
        self._listener(Note(text=text))

"""The Rig: one load_key's ranks under a keeper, measured candidate after candidate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autotune.candidate import Candidate
from autotune.errors import RigError
from autotune.measurement import Cost, DeviceMemory, Failure, Measurement, Memory, Moment, Outcome
from autotune.rig import device_report
from autotune.rig.assemble import (
    Kernel,
    Peaks,
    bodies_by_rank,
    bodies_of,
    end_of,
    exercised_of,
    failure_of,
    merge_speeds,
    models_of,
    tree_peaks,
    worst,
)
from autotune.rig.conversation import Answer, Conversation
from autotune.rig.keeper import Keeper
from autotune.rig.timeline import one_after_the_other
from autotune.trainers.base import ProbePlan

FULL_SHARE = 0.97
"""Of the limit: a process that is lost beyond this was lost for want of memory, whatever it died of."""

LoadRequest = Callable[[Candidate], Mapping[str, object]]
ProbeRequest = Callable[[Candidate, ProbePlan], Mapping[str, object]]


@dataclass(frozen=True, kw_only=True)
class Requests:
    """How a trainer words what a probe is to do."""

    load: LoadRequest
    probe: ProbeRequest


class ProcessRig:
    """Loads at its first measure, and again after its ranks were lost; the keeper's imports stay."""

    def __init__(self, *, load_key: str, keeper: Keeper, ranks: int, requests: Requests, on_load: Callable[[], None]) -> None:
        self.load_key = load_key
        self._keeper, self._ranks, self._requests, self._on_load = keeper, ranks, requests, on_load
        self._generation: int | None = None
        self._load_peaks = Peaks(peak_bytes=None, phase_peak_bytes={})
        self._load_devices: tuple[DeviceMemory, ...] = ()

    @property
    def loaded(self) -> bool:
        return self._keeper.alive and self._generation == self._keeper.generation

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        if candidate.load_key != self.load_key:
            raise RigError(f"Candidate {candidate.id} needs load {candidate.load_key}; this rig has {self.load_key}.")
        probe = _Probe(self, candidate, plan)
        try:
            return probe.run()
        except Exception:
            self.close()
            raise
        except BaseException:  # interrupted: nobody waits for a keeper that may be importing
            self._keeper.end()
            raise

    def close(self) -> None:
        if self._generation is not None:
            self._generation = None
            self._keeper.unload()


class _Probe:
    """One candidate on one rig."""

    def __init__(self, rig: ProcessRig, candidate: Candidate, plan: ProbePlan) -> None:
        self._rig, self._keeper, self._candidate = rig, rig._keeper, candidate
        self._plan = plan
        self._started = time.monotonic()
        self._deadline = self._started + plan.deadline_seconds
        self._load_seconds = 0.0
        self._load_timeline: tuple[Moment, ...] = ()
        self._printed_before = 0

    def run(self) -> Measurement:
        answer = self._answer()
        if answer.gone_before:  # ended while nothing was asked of it: says nothing about this candidate
            self._rig.close()
            answer = self._answer()
        return self._succeeded(answer) if answer.ended_well else self._failed(answer)

    def _answer(self) -> Answer:
        """Loads first where there is nothing loaded; a load that failed is the answer."""
        self._keeper.start()
        self._printed_before = self._keeper.mark_output()
        talk = Conversation(self._keeper, self._rig._ranks)
        if not self._rig.loaded:
            self._keeper.settle_gpus()
            request = {"scratch": self._keeper.scratch, **self._rig._requests.load(self._candidate)}
            answer = self._ask(lambda: talk.load(request, self._deadline))
            self._load_seconds = time.monotonic() - self._started
            if answer.ended_well:
                self._load_timeline = self._keeper.timeline()
            if not answer.ended_well:
                return answer
            self._rig._generation = self._keeper.generation
            self._rig._load_peaks, self._rig._load_devices = self._peaks(answer), self._devices(answer)
        return self._ask(lambda: talk.measure(self._rig._requests.probe(self._candidate, self._plan), self._deadline))

    def _ask(self, command: Callable[[], Answer]) -> Answer:
        if not self._rig.loaded:
            self._rig._on_load()
        self._keeper.mark()
        self._keeper.limit.reset()
        self._kills_before = self._keeper.limit.oom_kills()
        answer = command()
        self._keeper.check_gpus()
        return answer

    def _succeeded(self, answer: Answer) -> Measurement:
        bodies = bodies_of(answer)
        self._check_world(bodies)
        if not all(message.get("stays", True) for message in answer.results.values()):
            self._rig.close()  # a rank that keeps what it should have given back would spoil what comes next
        return replace(
            self._facts(answer, Outcome.OK),
            worst=merge_speeds([body["worst"] for body in bodies if body.get("worst")]),
            typical=merge_speeds([body["typical"] for body in bodies if body.get("typical")]),
        )

    def _failed(self, answer: Answer) -> Measurement:
        kernel = self._kernel()
        if answer.keeper_lost and not kernel.out_of_memory:
            self._keeper.end()
            last = answer.printed.strip().rpartition("\n")[2][-500:]
            raise RigError(f"The keeper of the rig ended while it was measuring: {last or 'it said nothing'}")
        answer = self._among_known_neighbours(answer)
        outcome, failure = failure_of(answer, kernel, self._keeper.device_kind, self._plan.deadline_seconds)
        self._blame_newcomers(outcome)
        measurement = replace(self._facts(answer, outcome), failure=failure)
        self._after_failure(answer, failure)
        return measurement

    def _among_known_neighbours(self, answer: Answer) -> Answer:
        """Who was on the GPUs before, our ballast too, is accounted for: what an error says about them names no cause."""
        if self._keeper.gpus is None:
            return answer
        words = device_report.without_neighbours
        return replace(answer, failures=words(answer.failures), printed=words(answer.printed))

    def _blame_newcomers(self, outcome: Outcome) -> None:
        gpus, meter = self._keeper.gpus, self._keeper.device_meter
        if gpus is None or meter is None or not outcome.is_out_of_memory or outcome is Outcome.OOM_HOST:
            return
        taken = device_report.taken_meanwhile(gpus, meter.peaks())
        if taken is not None:
            raise RigError(taken)

    def _after_failure(self, answer: Answer, failure: Failure) -> None:
        """One rank that gave its memory back goes on; anything else is loaded anew."""
        if answer.keeper_lost:
            self._keeper.end()
        alone_and_well = self._rig._ranks == 1 and all(message.get("stays", False) for message in answer.failures)
        if not (self._rig.loaded and alone_and_well and answer.failures) or failure.cause == "cuda_fault":
            self._rig._generation = None
            self._keeper.unload()

    def _facts(self, answer: Answer, outcome: Outcome) -> Measurement:
        bodies = bodies_of(answer)
        devices = device_report.together(self._rig._load_devices, self._devices(answer))
        peaks = self._with_the_load(answer, devices)
        seconds = time.monotonic() - self._started
        first = bodies[0] if bodies else {}
        return Measurement(
            candidate_id=self._candidate.id,
            outcome=outcome,
            memory=Memory(
                peak_bytes=peaks.peak_bytes,
                limit_bytes=self._keeper.effective_limit_bytes,
                bound_by=self._keeper.bound_by,
                phase_peak_bytes=peaks.phase_peak_bytes,
                devices=devices,
                torch_by_phase=device_report.torch_by_phase(bodies),
                torch_allocated_bytes=worst(bodies, "torch_allocated_bytes"),
                torch_reserved_bytes=worst(bodies, "torch_reserved_bytes"),
                torch_reserved_why=next((str(why) for body in bodies if (why := body.get("torch_reserved_why"))), None),
                allocation_retries=worst(bodies, "allocation_retries"),
                allocation_failures=worst(bodies, "allocation_failures"),
                models=models_of(bodies_by_rank(answer)),
                timeline=one_after_the_other(self._load_timeline, self._keeper.timeline(), self._load_seconds),
            ),
            cost=Cost(
                total_seconds=seconds,
                device_seconds=None if self._keeper.gpus is None else seconds * len(self._keeper.gpus.slots),
                load_seconds=self._load_seconds,
                setup_seconds=max((float(body.get("setup_seconds") or 0) for body in bodies), default=0.0),
                loop_seconds=max((float(body.get("loop_seconds") or 0) for body in bodies), default=0.0),
            ),
            optimizer_steps=int(first.get("optimizer_steps") or 0),
            exercised=exercised_of(bodies),
            effective=dict(first.get("effective") or {}),
            versions=dict(self._keeper.versions),
            printed=end_of(self._keeper.printed_since(self._printed_before)),
            caveats=() if self._keeper.gpus is None else device_report.caveats(self._keeper.gpus),
        )

    def _with_the_load(self, answer: Answer, devices: tuple[DeviceMemory, ...]) -> Peaks:
        """A real run loads as well: what that took counts for every candidate on this rig."""
        if self._keeper.gpus is not None:
            worst_phases = device_report.worst_phases(devices)
            return Peaks(peak_bytes=device_report.worst_peak(devices), phase_peak_bytes=worst_phases)
        peaks, before = self._peaks(answer), self._rig._load_peaks
        return Peaks(
            peak_bytes=max(peaks.peak_bytes or 0, before.peak_bytes or 0) or None,
            phase_peak_bytes={**before.phase_peak_bytes, **peaks.phase_peak_bytes},
        )

    def _peaks(self, answer: Answer) -> Peaks:
        meter, limit = self._keeper.meter, self._keeper.limit
        return tree_peaks(answer, meter.peak_bytes, meter.phase_peak_bytes, limit.ceiling_bytes())

    def _devices(self, answer: Answer) -> tuple[DeviceMemory, ...]:
        gpus, meter = self._keeper.gpus, self._keeper.device_meter
        if gpus is None:
            return ()
        first = 0 if self._keeper.span is None else self._keeper.span.first
        by_rank = {number - first: body for number, body in bodies_by_rank(answer).items()}
        elsewhere = device_report.on_another_device(gpus, by_rank)
        if elsewhere is not None:
            raise RigError(elsewhere)
        return device_report.device_memories(gpus, meter.peaks() if meter else {}, by_rank)

    def _kernel(self) -> Kernel:
        limit, meter = self._keeper.limit, self._keeper.meter
        killed = limit.oom_kills() > self._kills_before
        on_cpu = self._keeper.device_kind == "cpu"
        return Kernel(
            out_of_memory=killed or meter.went_over,
            own_limit=meter.went_over or limit.at_limit(),
            full=on_cpu and meter.peak_bytes >= FULL_SHARE * self._keeper.limit_bytes,
            host_short=not on_cpu and self._keeper.host.was_short(meter.peak_bytes),
        )

    def _check_world(self, bodies: list[Mapping[str, object]]) -> None:
        seen = {body["world_size"] for body in bodies if body.get("world_size") is not None}
        world = self._rig._ranks if self._keeper.span is None else self._keeper.span.world
        if seen - {world} or len(bodies) != self._rig._ranks:
            raise RigError(
                f"The trainer ran with a world size of {sorted(map(str, seen))} where {world} ranks were started: "
                "this measures another job than the one that was asked for."
            )

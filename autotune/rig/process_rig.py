"""The Rig: one load_key's ranks under a keeper, measured candidate after candidate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autotune.candidate import Candidate
from autotune.errors import RigError
from autotune.measurement import Cost, Failure, Measurement, Memory, Outcome
from autotune.rig.assemble import Kernel, Peaks, bodies_of, device_peaks, failure_of, merge_speeds, tree_peaks, worst
from autotune.rig.conversation import Answer, Conversation
from autotune.rig.keeper import Keeper
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

    def run(self) -> Measurement:
        answer = self._answer()
        if answer.gone_before:  # ended while nothing was asked of it: says nothing about this candidate
            self._rig.close()
            answer = self._answer()
        return self._succeeded(answer) if answer.ended_well else self._failed(answer)

    def _answer(self) -> Answer:
        """Loads first where there is nothing loaded; a load that failed is the answer."""
        self._keeper.start()
        talk = Conversation(self._keeper, self._rig._ranks)
        if not self._rig.loaded:
            request = {"scratch": self._keeper.scratch, **self._rig._requests.load(self._candidate)}
            answer = self._ask(lambda: talk.load(request, self._deadline))
            self._load_seconds = time.monotonic() - self._started
            if not answer.ended_well:
                return answer
            self._rig._generation = self._keeper.generation
            self._rig._load_peaks = self._peaks(answer)
        return self._ask(lambda: talk.measure(self._rig._requests.probe(self._candidate, self._plan), self._deadline))

    def _ask(self, command: Callable[[], Answer]) -> Answer:
        if not self._rig.loaded:
            self._rig._on_load()
        self._keeper.meter.mark()
        self._keeper.limit.reset()
        self._kills_before = self._keeper.limit.oom_kills()
        return command()

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
            said = answer.printed[-500:].strip() or "it said nothing"
            raise RigError(f"The keeper of the rig ended while it was measuring: {said}")
        outcome, failure = failure_of(answer, kernel, self._keeper.device_kind, self._plan.deadline_seconds)
        measurement = replace(self._facts(answer, outcome), failure=failure)
        self._after_failure(answer, failure)
        return measurement

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
        peaks, before = self._peaks(answer), self._rig._load_peaks
        first = bodies[0] if bodies else {}
        return Measurement(
            candidate_id=self._candidate.id,
            outcome=outcome,
            memory=Memory(
                # A real run loads as well: what that took counts for every candidate on this rig.
                peak_bytes=max(peaks.peak_bytes or 0, before.peak_bytes or 0) or None,
                limit_bytes=self._keeper.limit_bytes,
                bound_by=self._keeper.bound_by,
                phase_peak_bytes={**before.phase_peak_bytes, **peaks.phase_peak_bytes},
                torch_allocated_bytes=worst(bodies, "torch_allocated_bytes"),
                torch_reserved_bytes=worst(bodies, "torch_reserved_bytes"),
                allocation_retries=worst(bodies, "allocation_retries"),
            ),
            cost=Cost(
                total_seconds=time.monotonic() - self._started,
                load_seconds=self._load_seconds,
                setup_seconds=max((float(body.get("setup_seconds") or 0) for body in bodies), default=0.0),
                loop_seconds=max((float(body.get("loop_seconds") or 0) for body in bodies), default=0.0),
            ),
            optimizer_steps=int(first.get("optimizer_steps") or 0),
            effective=dict(first.get("effective") or {}),
            versions=dict(self._keeper.versions),
        )

    def _peaks(self, answer: Answer) -> Peaks:
        if self._keeper.device_kind == "cuda":
            return device_peaks(answer)
        meter, limit = self._keeper.meter, self._keeper.limit
        return tree_peaks(answer, meter.peak_bytes, meter.phase_peak_bytes, limit.ceiling_bytes())

    def _kernel(self) -> Kernel:
        limit, meter = self._keeper.limit, self._keeper.meter
        killed = limit.oom_kills() > self._kills_before
        full = self._keeper.device_kind == "cpu" and meter.peak_bytes >= FULL_SHARE * self._keeper.limit_bytes
        return Kernel(out_of_memory=killed or meter.went_over, own_limit=meter.went_over or limit.at_limit(), full=full)

    def _check_world(self, bodies: list[Mapping[str, object]]) -> None:
        seen = {body["world_size"] for body in bodies if body.get("world_size") is not None}
        if seen - {self._rig._ranks} or len(bodies) != self._rig._ranks:
            raise RigError(
                f"The trainer ran with a world size of {sorted(map(str, seen))} where {self._rig._ranks} ranks were started: "
                "this measures another job than the one that was asked for."
            )

"""Machines of the search benchmark: simulated ones and replayed tables, with a clock, costs, and a
truth."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
from search_simulator import Truth

from autotune.core.measurement import Cost, Failure, Measurement, Memory, Outcome, ProbePlan, Speed
from autotune.core.space import Candidate
from autotune.core.units import GIB
from autotune.search.trial_view import tiers_of
from autotune.worker.phase_recorder import out_of_reach


@dataclass(frozen=True)
class Noise:
    """Scatter of one cycle, of one probe as a whole, drift of a machine over minutes; cycles
    that are held up, and how long at most.
    """

    by_cycle: float = 0.02
    by_probe: float = 0.015
    drift: float = 0.03
    held_up: float = 0.03
    longest: float = 1.8


MEMORY_NOISE = 0.004
"""Standard deviation of the logarithmic peak between runs of one candidate."""

MOST_GROWTH = 0.02
"""Growth of a peak over a long training, at most: lengths, fragments."""

CLUSTER = Noise(
    by_cycle=0.06,
    by_probe=0.04,
    drift=0.10,
    held_up=0.08,
    longest=3.0,
)
"""Noise of a shared cluster."""


class Machine(Protocol):
    """Machine that measures candidates and advances a clock."""

    now: float

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement: ...

    def mean_speed(self, candidate: Candidate) -> float | None:
        """Its true mean tokens per second; None where it does not truly fit."""
        ...


@dataclass(frozen=True)
class Optimum:
    """The best there is: the highest true mean speed of what truly fits, in the most preferred
    tier where anything does.
    """

    speed: float
    members: frozenset[str]
    """Candidates of the tier."""

    speeds: Mapping[str, float]

    @classmethod
    def of(
        cls,
        machine: Machine,
        space: Any,
        candidates: Sequence[Candidate],
    ) -> Optimum | None:
        """Return the optimum, None where nothing fits."""
        for tier in tiers_of(space, candidates):
            speeds = {}
            for candidate in tier.candidates:
                speed = machine.mean_speed(candidate)
                if speed is not None:
                    speeds[candidate.id] = speed
            if speeds:
                return cls(
                    max(speeds.values()),
                    frozenset(candidate.id for candidate in tier.candidates),
                    speeds,
                )
        return None

    def share(self, candidate: Candidate | None) -> float:
        """0 for what does not truly fit, or learns something less preferred than what could have
        been had.
        """
        return 0.0 if candidate is None else self.speeds.get(candidate.id, 0.0) / self.speed


class Formulas(Protocol):
    """Truth of every candidate on one machine."""

    @property
    def limit_bytes(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def truth(self, candidate: Candidate) -> Truth: ...


class Simulated:
    """The simulator's truths, measured with noise, drift and hiccups."""

    def __init__(
        self,
        formulas: Formulas,
        *,
        memory_level: float,
        speed_level: float,
        seed: int,
        noise: Noise | None = None,
    ) -> None:
        self._formulas, self._bytes, self._pace = formulas, memory_level, speed_level
        self._dice, self._noise = random.Random(seed), noise or Noise()
        self._wave = (
            self._dice.uniform(0, self._noise.drift),
            self._dice.uniform(600, 3600),
            self._dice.uniform(0, 2 * math.pi),
        )
        self._truths: dict[str, Truth] = {}
        self._live: str | None = None
        self.now = 0.0

    def shortened(self, share: float) -> Simulated:
        """Return the same machine with probes of shorter rows and fewer of them."""
        return Simulated(
            replace(self._formulas, shortened=share),  # type: ignore[type-var]
            memory_level=self._bytes,
            speed_level=self._pace,
            seed=self._dice.randrange(2**31),
            noise=self._noise,
        )

    def truth(self, candidate: Candidate) -> Truth:
        if candidate.id not in self._truths:
            self._truths[candidate.id] = self._formulas.truth(candidate)
        return self._truths[candidate.id]

    def mean_speed(self, candidate: Candidate) -> float | None:
        truth = self.truth(candidate)
        return None if truth.cause else self._pace * truth.tokens / truth.cycle_seconds

    def peak_bytes(self, candidate: Candidate) -> float:
        return self.truth(candidate).peak_bytes * self._bytes

    def runs_out_later(self, candidate: Candidate, seed: int) -> bool:
        """Return True if a long training of the candidate runs out of memory: its peak varies from
        run to run and grows, while lengths and fragments differ from those of the probe.
        """
        dice = random.Random(f"later {seed} {candidate.id}")
        noise = math.exp(dice.gauss(0, MEMORY_NOISE))
        growth = 1 + dice.uniform(0, MOST_GROWTH)
        return self.truth(candidate).need_bytes * noise * growth > self._formulas.limit_bytes

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        truth, began = self.truth(candidate), self.now
        loading = (
            0.0
            if candidate.load_key == self._live
            else truth.load_seconds * self._dice.uniform(0.9, 1.15)
        )
        # A single rank frees its memory after an error and stays; of several, one that ran out
        # leaves the others waiting for it, so all are ended.
        stays = truth.phase != "load" and self._formulas.ranks == 1
        self._live = candidate.load_key if stays or not truth.cause else None
        if truth.cause:
            seconds = (
                loading * 0.8
                if truth.phase == "load"
                else loading + truth.setup_seconds + self._until(truth)
            )
            self.now += seconds
            return self._failed(
                candidate, truth, Cost(total_seconds=seconds, load_seconds=min(loading, seconds))
            )
        self.now += loading + truth.setup_seconds
        speed = self._timed(truth, plan)
        cost = Cost(
            total_seconds=self.now - began,
            load_seconds=loading,
            setup_seconds=truth.setup_seconds,
        )
        return Measurement(
            candidate_id=candidate.id,
            outcome=Outcome.OK,
            memory=self._memory(truth),
            cost=cost,
            worst=speed,
            optimizer_steps=plan.timed_cycles + plan.warmup_cycles,
        )

    def expected_seconds(self, candidate: Candidate, plan: ProbePlan) -> float:
        """Return what a probe takes without noise, as if it fits."""
        truth = self.truth(candidate)
        loading = 0.0 if candidate.load_key == self._live else truth.load_seconds
        cycles = plan.warmup_cycles + plan.timed_cycles
        return loading + truth.setup_seconds + cycles * truth.cycle_seconds / self._pace

    def _until(self, truth: Truth) -> float:
        """Seconds of the first cycle that pass before the phase in which memory runs out."""
        passed = 0.0
        for phase in ("rollout", "sync", "forward", "backward", "optimizer"):
            if phase == truth.phase:
                return passed / self._pace
            passed += truth.by_phase[phase]
        return truth.by_phase["rollout"] / self._pace

    def _timed(self, truth: Truth, plan: ProbePlan) -> Speed:
        usual = truth.cycle_seconds / self._pace
        this_probe = math.exp(self._dice.gauss(0, self._noise.by_probe))
        self.now += plan.warmup_cycles * usual * self._dice.uniform(1.0, 1.3)
        cycles: list[float] = []
        for _ in range(plan.timed_cycles):
            cycles.append(usual * this_probe * self._scatter())
            self.now += cycles[-1]
            if len(cycles) < plan.timed_cycles and _hopeless(
                [truth.tokens / seconds for seconds in cycles], plan
            ):
                break
        phases = {}
        for name, seconds in truth.by_phase.items():
            phases[name] = seconds * sum(cycles) / truth.cycle_seconds
        return Speed(
            completion_tokens=truth.tokens,
            cycle_seconds=tuple(cycles),
            cycle_loss_tokens=(truth.tokens,) * len(cycles),
            prompt_tokens=0,
            phase_seconds=phases,
            cut_short=len(cycles) < plan.timed_cycles,
        )

    def _scatter(self) -> float:
        amplitude, period, phase = self._wave
        drift = 1 + amplitude * math.sin(2 * math.pi * self.now / period + phase)
        hiccup = (
            self._dice.uniform(1.2, self._noise.longest)
            if self._dice.random() < self._noise.held_up
            else 1.0
        )
        return drift * hiccup * math.exp(self._dice.gauss(0, self._noise.by_cycle))

    def _memory(self, truth: Truth) -> Memory:
        limit = round(self._formulas.limit_bytes * self._bytes)
        peak = min(limit, round(truth.peak_bytes * self._bytes))
        phases = {}
        if not truth.cause:
            for name, size in truth.peaks.items():
                phases[str(name)] = min(limit, round(size * self._bytes))
        return Memory(
            peak_bytes=peak,
            limit_bytes=limit,
            bound_by="simulated",
            phase_peak_bytes=phases,
        )

    def _failed(
        self,
        candidate: Candidate,
        truth: Truth,
        cost: Cost,
    ) -> Measurement:
        numbers = {}
        for name, value in truth.numbers.items():
            numbers[name] = round(value * self._bytes) if name.endswith("_bytes") else value
        row = (
            {"engine_startup": "vllm_reservation", "kv_cache": "vllm_kv_too_small"}.get(
                truth.cause or ""
            )
            if truth.phase == "load"
            else None
        )
        failure = Failure(
            evidence=_words(truth.cause, numbers),
            phase=truth.phase,
            cause=truth.cause,
            row=row,
            numbers=numbers,
        )
        outcome = Outcome(f"oom_{truth.phase}")
        return Measurement(
            candidate_id=candidate.id,
            outcome=outcome,
            memory=self._memory(truth),
            cost=cost,
            failure=failure,
        )


def _words(cause: str | None, numbers: Mapping[str, float]) -> str:
    """Return the message of a framework for this failure, shortened."""
    request = f"{numbers.get('asked_bytes', 0) / GIB:.2f} GiB"
    free = f"{numbers.get('free_bytes', 0) / GIB:.2f} GiB"
    total = f"{numbers.get('total_bytes', 0) / GIB:.2f} GiB"
    if cause == "kv_cache" and "asked_length" in numbers:
        length, longest = numbers["asked_length"], numbers["longest_length"]
        return (
            f"ValueError: max seq len ({length}) needs {request} of KV cache, {free} available;"
            f" maximum length {longest}"
        )
    if cause == "engine_startup":
        return (
            f"ValueError: Free memory on device ({free} of {total}) on startup is less than desired"
            f" ({request})"
        )
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {request}. {total} in all,"
        f" of which {free} is free."
    )


def _hopeless(rates: list[float], plan: ProbePlan) -> bool:
    goal = plan.stop_below_tokens_per_second
    return goal is not None and out_of_reach(rates, goal=goal, spread=plan.cycle_spread)


class Replayed:
    """A table of real measurements: one of a candidate's rounds is drawn each time, with its
    real speed, cost and failure.
    """

    def __init__(
        self,
        rows: Mapping[str, Sequence[Mapping[str, Any]]],
        limit_bytes: int,
        loads: Mapping[str, float],
        *,
        seed: int,
    ) -> None:
        self._rows, self._limit, self._loads = rows, limit_bytes, loads
        self._dice = random.Random(seed)
        self._live: str | None = None
        self.now = 0.0

    def mean_speed(self, candidate: Candidate) -> float | None:
        """The mean of its rounds; it fits where most of them did."""
        rows = self._rows[candidate.id]
        speeds = [_speed(row).tokens_per_second for row in rows if row["outcome"] == "ok"]
        return statistics.mean(speeds) if len(speeds) * 2 > len(rows) else None

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        row = self._dice.choice(self._rows[candidate.id])
        cost, fails = row["cost"], row["outcome"] != "ok"
        warm = cost["total_seconds"] - cost["load_seconds"]
        loading = (
            0.0
            if candidate.load_key == self._live and row["outcome"] != "oom_load"
            else self._loads[candidate.load_key]
        )
        self._live = None if fails else candidate.load_key  # a kill takes the process along
        self.now += warm + loading
        failure = row["failure"]
        return Measurement(
            candidate_id=candidate.id,
            outcome=Outcome(row["outcome"]),
            memory=Memory(
                peak_bytes=row["peak_bytes"],
                limit_bytes=self._limit,
                bound_by="replayed",
            ),
            cost=Cost(total_seconds=warm + loading, load_seconds=loading),
            worst=None if fails else _speed(row),
            failure=None if failure is None else msgspec.convert(failure, Failure),
        )


def _speed(row: Mapping[str, Any]) -> Speed:
    return msgspec.convert(row["speed"], Speed)


def load_costs(
    candidates: Sequence[Candidate], rows: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, float]:
    """Return the load seconds by load; where no measurement of a load had to load, the longest
    of any.
    """
    costs_by_load: dict[str, list[float]] = defaultdict(list)
    for candidate in candidates:
        costs = costs_by_load[candidate.load_key]
        for row in rows[candidate.id]:
            if row["cost"]["load_seconds"] > 0:
                costs.append(row["cost"]["load_seconds"])
    cost_by_load = {}
    for key, costs in costs_by_load.items():
        if costs:
            cost_by_load[key] = statistics.median(costs)
    longest = max(cost_by_load.values(), default=1.0)
    return {key: cost_by_load.get(key, longest) for key in costs_by_load}

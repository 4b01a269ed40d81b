"""Callback in the real loop: divides the run into units, times them, and stops the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import protocol
from ..early_stop import out_of_reach
from .hooks import LoopCounts
from .rollout_reuse import Rollouts

UNBOUNDED_UNITS = 10**6  # units of a run that ends by time
MAX_PROMPT_ROUNDS = 64  # different generation batches before the prompts repeat


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Shortest stretch of the loop that is timed as one."""

    optimizer_steps: int
    generations: int


@dataclass(frozen=True, kw_only=True)
class MeasurementPlan:
    """Units of one run."""

    unit: Unit
    # Units left out of the timing: at least one, because the first holds the first optimizer step.
    warmup: int
    timed: int

    @property
    def units(self) -> int:
        return self.warmup + self.timed

    @property
    def optimizer_steps(self) -> int:
        return self.units * self.unit.optimizer_steps

    @property
    def rounds_of_prompts(self) -> int:
        """Generation batches of different prompts."""
        return min(self.units, MAX_PROMPT_ROUNDS) * self.unit.generations


def unit_of(*, steps_per_generation: int, num_iterations: int, gradient_accumulation_steps: int) -> Unit:
    """Return the shortest stretch of whole cycles with whole optimizer steps: usually one cycle.

    A cycle is steps_per_generation x num_iterations micro-steps. If accumulation spans several cycles,
    or a cycle has an uneven number of optimizer steps, single cycles differ.
    """
    cycle = steps_per_generation * num_iterations
    micro_steps = math.lcm(cycle, gradient_accumulation_steps)
    return Unit(optimizer_steps=micro_steps // gradient_accumulation_steps, generations=micro_steps // cycle)


def measurement_plan(unit: Unit, plan: Mapping[str, Any]) -> MeasurementPlan:
    warmup = max(1, int(plan["warmup_cycles"]))
    if plan.get("soak_seconds"):
        return MeasurementPlan(unit=unit, warmup=warmup, timed=UNBOUNDED_UNITS)
    needed = math.ceil(int(plan["optimizer_steps"]) / unit.optimizer_steps)
    return MeasurementPlan(unit=unit, warmup=warmup, timed=max(1, int(plan["timed_cycles"]), needed - warmup))


CYCLE_SPREAD = 0.05  # Default standard deviation of a cycle's log speed


@dataclass(kw_only=True)
class Timing:
    """Timed units of one run."""

    seconds: list[float] = field(default_factory=list)
    loss_tokens: list[int] = field(default_factory=list)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    reward_seconds: float = 0.0
    borrowed_seconds: float = 0.0
    cut_short: bool = False
    # Memory in each unit: steps, seconds, peak_bytes, held_bytes.
    cycles: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TimedEnd:
    """Conditions for an early or a timed end of a run."""

    min_steps: int  # optimizer steps before any stop: only then the run is known to fit
    stop_below: float | None = None  # tokens per second that must stay within reach
    cycle_spread: float = CYCLE_SPREAD
    soak_seconds: float | None = None


class _Mark(NamedTuple):
    """State at the start of a unit."""

    at: float
    phases: dict[str, float]
    loss_tokens: int
    prompt_tokens: int
    reward_seconds: float
    borrowed: dict[str, float]


def step_timer(
    callback_class: Any,
    recorder: Any,
    seen: LoopCounts,
    plan: MeasurementPlan,
    end: TimedEnd,
    *,
    rollouts: Rollouts,
    reward_seconds: Callable[[], float],
    over_ranks: Callable[[float, int], tuple[float, int]],
    after_first_step: Callable[[], None],
) -> tuple[Any, Timing]:
    """Return the callback and its timing. `after_first_step` runs once, with all state present."""
    timing = Timing()

    class StepTimer(callback_class):  # type: ignore[misc]
        steps = 0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.rates: list[float] = []
            self.began = time.perf_counter()
            recorder.take_cycle()
            self._begin_unit()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            recorder.enter("optimizer")

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            recorder.leave()
            if self.steps == 0:  # during warm-up, so its time is not counted
                after_first_step()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps += 1
            if self.steps % plan.unit.optimizer_steps == 0:
                self._end_unit(control)
                self._begin_unit()

        def _begin_unit(self) -> None:
            phases = recorder.seconds()  # waits for the device
            borrowed = dict(rollouts.borrowed_seconds)
            counts = (seen.loss_tokens, seen.prompt_tokens, reward_seconds())
            self.mark = _Mark(time.perf_counter(), phases, *counts, borrowed)

        def _end_unit(self, control: Any) -> None:
            # 1. The unit's figures. Seconds of reused generations count as if they had run.
            phases, before = recorder.seconds(), self.mark
            borrowed = {name: spent - before.borrowed.get(name, 0.0) for name, spent in rollouts.borrowed_seconds.items()}
            seconds = time.perf_counter() - before.at + sum(borrowed.values())
            tokens = seen.loss_tokens - before.loss_tokens
            unit = self.steps // plan.unit.optimizer_steps
            units = None if end.soak_seconds else plan.units
            recorder.emit({"event": protocol.CYCLE, "done": unit, "of": units, "seconds": seconds, "tokens": tokens})
            since = time.perf_counter() - self.began
            timing.cycles.append({"steps": self.steps, "seconds": round(since, 4), **recorder.take_cycle()})
            # 2. The timing, after the warm-up.
            if unit <= plan.warmup:
                return
            timing.seconds.append(seconds)
            timing.loss_tokens.append(tokens)
            timing.prompt_tokens += seen.prompt_tokens - before.prompt_tokens
            timing.reward_seconds += reward_seconds() - before.reward_seconds
            timing.borrowed_seconds += sum(borrowed.values())
            for phase, total in phases.items():
                spent = total - before.phases[phase] + borrowed.get(phase, 0.0)
                timing.phase_seconds[phase] = timing.phase_seconds.get(phase, 0.0) + spent
            # 3. The decision to stop. All ranks use the same figures, so all of them stop, or none.
            if self.steps < end.min_steps:
                return
            if end.soak_seconds is not None:
                soaked, _ = over_ranks(time.perf_counter() - self.began, 0)
                control.should_training_stop = soaked >= end.soak_seconds
            elif unit < plan.units and end.stop_below is not None:
                slowest, together = over_ranks(seconds, tokens)
                self.rates.append(together / slowest)
                if out_of_reach(self.rates, goal=end.stop_below, spread=end.cycle_spread):
                    timing.cut_short = control.should_training_stop = True

    return StepTimer(), timing

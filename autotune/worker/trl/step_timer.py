"""Callback in the real loop: divides the run into units, times them, and stops the run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import protocol
from ..phase_recorder import out_of_reach
from ..protocol import Request, Result
from . import trainer_settings
from .hooks import LoopCounts
from .rollouts import Rollouts
from .training_data import RewardClock

UNBOUNDED_UNITS = 10**6  # units of a run that ends by time
MAX_PROMPT_ROUNDS = 64  # different generation batches before the prompts repeat
STEADY_RATIO = 1.1  # of two speeds in a row, below which they count as alike
CYCLE_SPREAD = 0.05  # default standard deviation of a cycle's log speed


@dataclass(frozen=True, kw_only=True)
class MeasurementPlan:
    """Units of one run. A unit is the shortest stretch of the loop that is timed as one."""

    unit_steps: int = 1  # optimizer steps of a unit
    unit_generations: int = 1
    # units left out of the timing: at least one, because the first holds the first optimizer step
    warmup: int
    timed: int
    settling: int = 0  # further units that may be left out, until the speed is steady

    @property
    def units(self) -> int:
        return self.warmup + self.settling + self.timed

    @property
    def optimizer_steps(self) -> int:
        return self.units * self.unit_steps

    @property
    def rounds_of_prompts(self) -> int:
        """Generation batches of different prompts."""
        return min(self.units, MAX_PROMPT_ROUNDS) * self.unit_generations


def measurement_plan(plan: Request, config: Any) -> MeasurementPlan:
    """Plan whole cycles with whole optimizer steps: the unit is usually one cycle.

    A cycle is steps_per_generation x num_iterations micro-steps. If accumulation spans several
    cycles, or a cycle has an uneven number of optimizer steps, single cycles differ. `config`: None
    for a method without cycles, whose unit is one optimizer step.
    """
    unit_steps = unit_generations = 1
    if config is not None:
        cycle = config.steps_per_generation * config.num_iterations
        micro_steps = math.lcm(cycle, config.gradient_accumulation_steps)
        unit_steps = micro_steps // config.gradient_accumulation_steps
        unit_generations = micro_steps // cycle

    settling = 0
    warmup = max(1, int(plan["warmup_cycles"]))
    if plan.get("soak_seconds"):
        timed = UNBOUNDED_UNITS
    else:
        optimizer_steps = int(plan["optimizer_steps"])
        required_units = math.ceil(optimizer_steps / unit_steps)
        timed_cycles = int(plan["timed_cycles"])
        timed = max(1, timed_cycles, required_units - warmup)
        settling = int(plan.get("settling_cycles") or 0)
    return MeasurementPlan(
        unit_steps=unit_steps,
        unit_generations=unit_generations,
        warmup=warmup,
        timed=timed,
        settling=settling,
    )


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """Conditions under which a run ends before its plan is done."""

    min_steps: int  # optimizer steps without which a run is not known to fit
    soak_seconds: float | None  # the run ends after this time, and not before
    below_tokens_per_second: float | None  # the run ends once it can't reach this speed
    cycle_spread: float  # standard deviation of a cycle's log speed

    @staticmethod
    def of_plan(plan: Request, below_tokens_per_second: float | None) -> StopRule:
        return StopRule(
            min_steps=int(plan["optimizer_steps"]),
            soak_seconds=plan.get("soak_seconds"),
            below_tokens_per_second=below_tokens_per_second,
            cycle_spread=float(plan.get("cycle_spread") or CYCLE_SPREAD),
        )


@dataclass(frozen=True, kw_only=True)
class _LoopState:
    """State of the loop at the start or the end of a unit."""

    time: float  # of the recorder
    phase_seconds: Mapping[str, float]
    borrowed_seconds: Mapping[str, float]  # of reused generations, by phase
    loss_tokens: int
    prompt_tokens: int
    reward_seconds: float


class StepTimer:
    """Times the units of one run; a mixin for the framework's callback class.

    `speed` has the timed units, `cycles` the memory in each unit.
    """

    def __init__(
        self,
        plan: MeasurementPlan,
        stop_rule: StopRule,
        *,
        recorder: Any,
        counts: LoopCounts,
        rollouts: Rollouts,
        reward_clock: RewardClock,
    ) -> None:
        self._plan = plan
        self._stop_rule = stop_rule
        self._recorder = recorder
        self._counts = counts
        self._rollouts = rollouts
        self._reward_clock = reward_clock
        self.trainer: Any = None  # set once it is constructed
        self.steps = 0
        self.model_bytes: dict[str, int] | None = None  # after the first optimizer step
        self.cycles: list[Result] = []
        self.speed: Result = {"left_out_cycles": 0, "steady": None}
        self._rates: list[float] = []  # tokens per second of each timed unit, over all ranks
        self._first_rate = 0.0  # of the first timed unit
        self._begin_timing()

    # Events of the framework's loop.

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()
        self._recorder.take_cycle()
        self._unit_start = self._loop_state()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.enter("optimizer")

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.leave()
        if self.steps == 0:
            # All state exists now, and the first unit is a warm-up, whose time is not counted.
            self.model_bytes = trainer_settings.model_bytes(self.trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        if self.steps % self._plan.unit_steps == 0:
            self._end_unit(control)
            self._unit_start = self._loop_state()

    # Units.

    def _loop_state(self) -> _LoopState:
        # The recorder waits for the device, and its phases sum to the wall time. A clock that is
        # read after it would count a pause in between, which no phase has.
        phase_seconds = self._recorder.seconds()
        return _LoopState(
            time=sum(phase_seconds.values()),
            phase_seconds=phase_seconds,
            borrowed_seconds=dict(self._rollouts.borrowed_seconds),
            loss_tokens=self._counts.loss_tokens,
            prompt_tokens=self._counts.prompt_tokens,
            reward_seconds=self._reward_clock.seconds,
        )

    def _end_unit(self, control: Any) -> None:
        # 1. The unit's figures. Seconds of reused generations count as if they had run.
        start = self._unit_start
        end = self._loop_state()
        borrowed = {}
        for phase, total in end.borrowed_seconds.items():
            borrowed_before = start.borrowed_seconds.get(phase, 0.0)
            borrowed[phase] = total - borrowed_before
        borrowed_total = sum(borrowed.values())
        seconds = end.time - start.time + borrowed_total
        tokens = end.loss_tokens - start.loss_tokens
        unit = self.steps // self._plan.unit_steps

        # 2. Messages.
        plan = self._plan
        units = None
        if not self._stop_rule.soak_seconds:
            units = plan.warmup + self.speed["left_out_cycles"] + plan.timed
        self._recorder.emit(
            {
                "event": protocol.CYCLE,
                "done": unit,
                "of": units,
                "seconds": seconds,
                "tokens": tokens,
            }
        )
        seconds_so_far = time.perf_counter() - self._began
        cycle = {"steps": self.steps, "seconds": round(seconds_so_far, 4)}
        recorded = self._recorder.take_cycle()
        self.cycles.append({**cycle, **recorded})

        # 3. The timing and the decision to stop, after the warm-up.
        if unit <= plan.warmup:
            return
        if plan.settling:
            self._settle(seconds, tokens)
        self._add_timed_unit(start, end, borrowed, seconds, tokens)
        if len(self.speed["cycle_seconds"]) >= plan.timed:
            control.should_training_stop = True
        # Before the required steps the run is not known to fit.
        if self.steps >= self._stop_rule.min_steps:
            self._decide_to_stop(control, seconds, tokens)

    def _settle(self, seconds: float, tokens: int) -> None:
        """Start the timing anew while the first two timed units differ.

        Compilation, autotuned kernels and rising or falling clocks last longer than one unit. The
        ranks compare the same figures, so all of them start anew, or none.
        """
        timed = len(self.speed["cycle_seconds"])
        if timed > 1:
            return
        slowest_seconds, all_tokens = _over_ranks(self.trainer.accelerator, seconds, tokens)
        rate = all_tokens / slowest_seconds
        if timed == 1:
            ratio = rate / self._first_rate
            self.speed["steady"] = 1 / STEADY_RATIO <= ratio <= STEADY_RATIO
            if not self.speed["steady"] and self.speed["left_out_cycles"] < self._plan.settling:
                self.speed["left_out_cycles"] += 1
                self._begin_timing()
        self._first_rate = rate

    def _begin_timing(self) -> None:
        self._rates.clear()
        self.speed |= {
            "cycle_seconds": [],
            "cycle_loss_tokens": [],
            "prompt_tokens": 0,
            "phase_seconds": {},
            "user_reward_seconds": 0.0,
            "cut_short": False,
            "borrowed_seconds": 0.0,
        }

    def _add_timed_unit(
        self,
        start: _LoopState,
        end: _LoopState,
        borrowed: Mapping[str, float],
        seconds: float,
        tokens: int,
    ) -> None:
        speed = self.speed
        speed["cycle_seconds"].append(seconds)
        speed["cycle_loss_tokens"].append(tokens)
        speed["prompt_tokens"] += end.prompt_tokens - start.prompt_tokens
        speed["user_reward_seconds"] += end.reward_seconds - start.reward_seconds
        speed["borrowed_seconds"] += sum(borrowed.values())
        by_phase = speed["phase_seconds"]
        for phase, total in end.phase_seconds.items():
            borrowed_part = borrowed.get(phase, 0.0)
            spent = total - start.phase_seconds[phase] + borrowed_part
            by_phase[phase] = by_phase.get(phase, 0.0) + spent

    def _decide_to_stop(
        self,
        control: Any,
        seconds: float,
        tokens: int,
    ) -> None:
        """Stop the loop if the rule ends it.

        All ranks use the same figures, so all of them stop, or none.
        """
        rule = self._stop_rule
        accelerator = self.trainer.accelerator
        if rule.soak_seconds is not None:
            soak_seconds = time.perf_counter() - self._began
            soaked, _ = _over_ranks(accelerator, soak_seconds, 0)
            control.should_training_stop = soaked >= rule.soak_seconds
        elif not control.should_training_stop and rule.below_tokens_per_second is not None:
            slowest_seconds, all_tokens = _over_ranks(accelerator, seconds, tokens)
            self._rates.append(all_tokens / slowest_seconds)
            goal = rule.below_tokens_per_second
            spread = rule.cycle_spread
            if out_of_reach(self._rates, goal=goal, spread=spread):
                self.speed["cut_short"] = control.should_training_stop = True


def _over_ranks(
    accelerator: Any,
    seconds: float,
    tokens: int,
) -> tuple[float, int]:
    """Return the slowest rank's seconds and the sum of all ranks' tokens."""
    import torch

    rank_figures = torch.tensor([[seconds, float(tokens)]], device=accelerator.device)
    all_seconds, all_tokens = accelerator.gather(rank_figures).unbind(1)
    return float(all_seconds.max()), int(all_tokens.sum())

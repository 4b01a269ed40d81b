"""Callback in the real loop: divides the run into units, times them, and stops the run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .. import protocol
from ..phase_recorder import out_of_reach
from . import trainer_settings

if TYPE_CHECKING:
    from .trainer_run import TrainerRun

UNBOUNDED_UNITS = 10**6  # units of a run that ends by time
MAX_PROMPT_ROUNDS = 64  # different generation batches before the prompts repeat
CYCLE_SPREAD = 0.05  # default standard deviation of a cycle's log speed


@dataclass(frozen=True, kw_only=True)
class MeasurementPlan:
    """Units of one run. A unit is the shortest stretch of the loop that is timed as one."""

    unit_steps: int = 1  # optimizer steps of a unit
    unit_generations: int = 1
    # units left out of the timing: at least one, because the first holds the first optimizer step
    warmup: int
    timed: int

    @property
    def units(self) -> int:
        return self.warmup + self.timed

    @property
    def optimizer_steps(self) -> int:
        return self.units * self.unit_steps

    @property
    def rounds_of_prompts(self) -> int:
        """Generation batches of different prompts."""
        return min(self.units, MAX_PROMPT_ROUNDS) * self.unit_generations


def measurement_plan(plan: Mapping[str, Any], config: Any) -> MeasurementPlan:
    """Plan whole cycles with whole optimizer steps: the unit is usually one cycle. `config`: None
    if each step is one.

    A cycle is steps_per_generation x num_iterations micro-steps. If accumulation spans several
    cycles, or a cycle has an uneven number of optimizer steps, single cycles differ.
    """
    unit_steps = unit_generations = 1
    if config is not None:
        cycle = config.steps_per_generation * config.num_iterations
        micro_steps = math.lcm(cycle, config.gradient_accumulation_steps)
        unit_steps, unit_generations = (
            micro_steps // config.gradient_accumulation_steps,
            micro_steps // cycle,
        )
    warmup = max(1, int(plan["warmup_cycles"]))
    needed = math.ceil(int(plan["optimizer_steps"]) / unit_steps)
    timed = (
        UNBOUNDED_UNITS
        if plan.get("soak_seconds")
        else max(1, int(plan["timed_cycles"]), needed - warmup)
    )
    return MeasurementPlan(
        unit_steps=unit_steps, unit_generations=unit_generations, warmup=warmup, timed=timed
    )


def step_timer(callback_class: Any, run: TrainerRun, plan: MeasurementPlan) -> Any:
    """Return the callback. Its `speed` has the timed units, `cycles` the memory in each one."""
    recorder, seen, min_steps = run.recorder, run.seen, int(run.plan["optimizer_steps"])
    soak_seconds, spread = (
        run.plan.get("soak_seconds"),
        float(run.plan.get("cycle_spread") or CYCLE_SPREAD),
    )
    speed: dict[str, Any] = {
        "cycle_seconds": [],
        "cycle_loss_tokens": [],
        "prompt_tokens": 0,
        "phase_seconds": {},
        "user_reward_seconds": 0.0,
        "cut_short": False,
        "borrowed_seconds": 0.0,
    }
    cycles: list[dict[str, Any]] = []

    class StepTimer(callback_class):  # type: ignore[misc]
        steps = 0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.rates: list[float] = []
            self.began = time.perf_counter()
            recorder.take_cycle()
            self.mark = self._now()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            recorder.enter("optimizer")

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            recorder.leave()
            if (
                self.steps == 0
            ):  # with all state present, and during warm-up, so its time is not counted
                run.found["model_bytes"] = trainer_settings.model_bytes(run.trainer)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps += 1
            if self.steps % plan.unit_steps == 0:
                self._end_unit(control)
                self.mark = self._now()

        def _now(self) -> SimpleNamespace:
            """Return the state at the start or the end of a unit."""
            phases, at = (
                recorder.seconds(),
                time.perf_counter(),
            )  # the recorder waits for the device
            return SimpleNamespace(
                at=at,
                phases=phases,
                borrowed=dict(run.rollouts.borrowed_seconds),
                loss_tokens=seen.loss_tokens,
                prompt_tokens=seen.prompt_tokens,
                reward_seconds=run.reward_clock.seconds,
            )

        def _end_unit(self, control: Any) -> None:
            # 1. The unit's figures. Seconds of reused generations count as if they had run.
            before, now = self.mark, self._now()
            borrowed = {
                name: spent - before.borrowed.get(name, 0.0) for name, spent in now.borrowed.items()
            }
            seconds = now.at - before.at + sum(borrowed.values())
            tokens = now.loss_tokens - before.loss_tokens
            unit = self.steps // plan.unit_steps
            units = None if soak_seconds else plan.units
            recorder.emit(
                {
                    "event": protocol.CYCLE,
                    "done": unit,
                    "of": units,
                    "seconds": seconds,
                    "tokens": tokens,
                }
            )
            since = time.perf_counter() - self.began
            cycles.append(
                {"steps": self.steps, "seconds": round(since, 4), **recorder.take_cycle()}
            )
            # 2. The timing, after the warm-up.
            if unit <= plan.warmup:
                return
            speed["cycle_seconds"].append(seconds)
            speed["cycle_loss_tokens"].append(tokens)
            speed["prompt_tokens"] += now.prompt_tokens - before.prompt_tokens
            speed["user_reward_seconds"] += now.reward_seconds - before.reward_seconds
            speed["borrowed_seconds"] += sum(borrowed.values())
            for phase, total in now.phases.items():
                spent = total - before.phases[phase] + borrowed.get(phase, 0.0)
                speed["phase_seconds"][phase] = speed["phase_seconds"].get(phase, 0.0) + spent
            # 3. The decision to stop. All ranks use the same figures, so all of them stop, or none.
            if self.steps < min_steps:  # until then the run is not known to fit
                return
            if soak_seconds is not None:
                soaked, _ = _over_ranks(
                    run.trainer.accelerator, time.perf_counter() - self.began, 0
                )
                control.should_training_stop = soaked >= soak_seconds
            elif unit < plan.units and run.stop_below is not None:
                slowest, together = _over_ranks(run.trainer.accelerator, seconds, tokens)
                self.rates.append(together / slowest)
                if out_of_reach(self.rates, goal=run.stop_below, spread=spread):
                    speed["cut_short"] = control.should_training_stop = True

    timer = StepTimer()
    timer.speed, timer.cycles = speed, cycles
    return timer


def _over_ranks(accelerator: Any, seconds: float, tokens: int) -> tuple[float, int]:
    """Return the slowest rank's seconds and the sum of all ranks' tokens."""
    import torch

    figures = accelerator.gather(
        torch.tensor([[seconds, float(tokens)]], device=accelerator.device)
    )
    return float(figures[:, 0].max()), int(figures[:, 1].sum())

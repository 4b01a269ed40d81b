"""Unit of the loop that is timed, and number of units in a run.

A generation cycle is steps_per_generation x num_iterations micro-steps. If accumulation spans
several cycles, or a cycle has an uneven number of optimizer steps, single cycles differ. The unit
is therefore the shortest stretch of whole cycles with whole optimizer steps: usually one cycle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    cycle = steps_per_generation * num_iterations
    micro_steps = math.lcm(cycle, gradient_accumulation_steps)
    return Unit(optimizer_steps=micro_steps // gradient_accumulation_steps, generations=micro_steps // cycle)


def measurement_plan(unit: Unit, plan: Mapping[str, Any]) -> MeasurementPlan:
    warmup = max(1, int(plan["warmup_cycles"]))
    if plan.get("soak_seconds"):
        return MeasurementPlan(unit=unit, warmup=warmup, timed=UNBOUNDED_UNITS)
    needed = math.ceil(int(plan["optimizer_steps"]) / unit.optimizer_steps)
    return MeasurementPlan(unit=unit, warmup=warmup, timed=max(1, int(plan["timed_cycles"]), needed - warmup))

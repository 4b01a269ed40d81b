"""How much of the loop is one measurable unit, and when enough was seen.

A generation cycle is steps_per_generation x num_iterations micro-steps. Where accumulation spans several cycles, or a cycle
several optimizer steps unevenly, single cycles differ in what they contain; so what is timed is the least stretch of whole
cycles that holds whole optimizer steps. In the usual case that is one cycle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ENDLESS = 10**6
"""Units of a run that time ends."""

MOST_ROUNDS = 64
"""So many different generation batches are made before the prompts come round again."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The stretch of the loop that is timed as one."""

    optimizer_steps: int
    """Optimizer steps in it: at least one."""

    generations: int
    """Generation cycles in it: at least one."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """How many units one run takes."""

    unit: Unit
    warmup: int
    """Units left out of the timing: the first holds the first optimizer step, so there is at least one."""

    timed: int

    @property
    def units(self) -> int:
        return self.warmup + self.timed

    @property
    def optimizer_steps(self) -> int:
        return self.units * self.unit.optimizer_steps

    @property
    def generations(self) -> int:
        return self.units * self.unit.generations

    @property
    def rounds_of_prompts(self) -> int:
        """Generation batches' worth of different prompts: one each; of a run without end as many as repeat unnoticed."""
        return min(self.units, MOST_ROUNDS) * self.unit.generations


def unit_of(*, steps_per_generation: int, num_iterations: int, gradient_accumulation_steps: int) -> Unit:
    cycle = steps_per_generation * num_iterations
    micro_steps = math.lcm(cycle, gradient_accumulation_steps)
    return Unit(optimizer_steps=micro_steps // gradient_accumulation_steps, generations=micro_steps // cycle)


def course_of(unit: Unit, plan: Mapping[str, Any]) -> Course:
    warmup = max(1, int(plan["warmup_cycles"]))
    if plan.get("soak_seconds"):
        return Course(unit=unit, warmup=warmup, timed=ENDLESS)
    timed = max(1, int(plan["timed_cycles"]))
    enough = math.ceil(int(plan["optimizer_steps"]) / unit.optimizer_steps)
    return Course(unit=unit, warmup=warmup, timed=max(timed, enough - warmup))

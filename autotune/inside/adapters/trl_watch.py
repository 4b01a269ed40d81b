"""A callback on the real loop: cuts the run into units, times them, and ends it when enough was seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..reach import out_of_reach
from .trl_hooks import Seen
from .trl_rollouts import Rollouts
from .trl_units import Course

CYCLE_SPREAD = 0.05
"""How much one cycle's speed scatters where the plan does not say."""


@dataclass(kw_only=True)
class Timing:
    """The timed units of one run."""

    seconds: list[float] = field(default_factory=list)
    loss_tokens: list[int] = field(default_factory=list)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    reward_seconds: float = 0.0
    borrowed_seconds: float = 0.0
    cut_short: bool = False
    cycles: list[dict[str, Any]] = field(default_factory=list)
    """What memory did in each unit: steps, seconds, peak_bytes, held_bytes."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """When a run ends before its course does, or how long it goes on."""

    enough_steps: int
    """Before these no run ends: only then it is known to fit."""

    stop_below: float | None = None
    """The speed that must stay within reach."""

    cycle_spread: float = CYCLE_SPREAD
    soak_seconds: float | None = None


@dataclass(frozen=True)
class _Mark:
    """How far things were when a unit began."""

    at: float
    phases: dict[str, float]
    loss_tokens: int
    prompt_tokens: int
    rewarded: float
    borrowed: dict[str, float]


def watcher(
    callback_class: Any,
    stage: Any,
    seen: Seen,
    course: Course,
    ending: Ending,
    *,
    rollouts: Rollouts,
    reward_seconds: Callable[[], float],
    over_ranks: Callable[[float, int], tuple[float, int]],
    weigh: Callable[[], None],
) -> tuple[Any, Timing]:
    """The callback that times units, and the timing that it fills; `weigh` is called once, with all training state there."""
    timing = Timing()

    class Watcher(callback_class):  # type: ignore[misc]
        steps = 0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.rates: list[float] = []
            self.began = time.perf_counter()
            stage.take_cycle()
            self._begin()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            stage.enter("optimizer")

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            stage.leave()
            if self.steps == 0:  # in the warm-up, so that nobody's time is counted for it
                weigh()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps += 1
            if self.steps % course.unit.optimizer_steps == 0:
                self._end(control)
                self._begin()

        def _begin(self) -> None:
            phases = stage.seconds()  # waits for the device
            self.mark = _Mark(
                time.perf_counter(), phases, seen.loss_tokens, seen.prompt_tokens, reward_seconds(),
                dict(rollouts.borrowed_seconds),
            )  # fmt: skip

        def _end(self, control: Any) -> None:
            phases, before = stage.seconds(), self.mark
            borrowed = {name: spent - before.borrowed.get(name, 0.0) for name, spent in rollouts.borrowed_seconds.items()}
            took = time.perf_counter() - before.at + sum(borrowed.values())
            tokens = seen.loss_tokens - before.loss_tokens
            unit = self.steps // course.unit.optimizer_steps
            units = None if ending.soak_seconds else course.units
            stage.emit({"event": "cycle", "done": unit, "of": units, "seconds": took, "tokens": tokens})
            since = time.perf_counter() - self.began
            timing.cycles.append({"steps": self.steps, "seconds": round(since, 4), **stage.take_cycle()})
            if unit <= course.warmup:
                return
            timing.seconds.append(took)
            timing.loss_tokens.append(tokens)
            timing.prompt_tokens += seen.prompt_tokens - before.prompt_tokens
            timing.reward_seconds += reward_seconds() - before.rewarded
            timing.borrowed_seconds += sum(borrowed.values())
            for phase, seconds in phases.items():
                spent = seconds - before.phases[phase] + borrowed.get(phase, 0.0)
                timing.phase_seconds[phase] = timing.phase_seconds.get(phase, 0.0) + spent
            if self.steps >= ending.enough_steps:
                self._judge(control, took, tokens, last=unit >= course.units)

        def _judge(self, control: Any, took: float, tokens: int, *, last: bool) -> None:
            if ending.soak_seconds is not None:
                soaked, _ = over_ranks(time.perf_counter() - self.began, 0)
                control.should_training_stop = soaked >= ending.soak_seconds
            elif not last and self._is_hopeless(took, tokens):
                timing.cut_short = control.should_training_stop = True

        def _is_hopeless(self, seconds: float, tokens: int) -> bool:
            """Whether the speed is out of reach. All ranks see the same figures, so all of them stop, or none."""
            if ending.stop_below is None:
                return False
            slowest, together = over_ranks(seconds, tokens)
            self.rates.append(together / slowest)
            return out_of_reach(self.rates, goal=ending.stop_below, spread=ending.cycle_spread)

    return Watcher(), timing

"""Start of the timing: units are left out until the speed is steady, by a clock set by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.worker.drive import events_stage, inside
from tests.worker.test_phase_recorder import ManualClock, ManualMeter

TOKENS = 100


def timed(seconds_of_units: Sequence[float], settling: int) -> tuple[dict[str, Any], int]:
    """Return the speed of a loop with these units, and how many of them ran."""
    step_timer = inside("trl.step_timer")
    clock = ManualClock()
    recorder, _ = events_stage(clock=clock, meter=ManualMeter())
    request = {
        "optimizer_steps": 2,
        "warmup_cycles": 1,
        "timed_cycles": 3,
        "settling_cycles": settling,
    }
    counts = inside("trl.hooks").LoopCounts()
    timer = step_timer.StepTimer(
        step_timer.measurement_plan(request, None),
        step_timer.StopRule.of_plan(request, None),
        recorder=recorder,
        counts=counts,
        rollouts=inside("trl.rollouts").Rollouts(recorder),
        reward_clock=inside("trl.training_data").RewardClock(),
    )
    # One rank gathers its own figures.
    accelerator = SimpleNamespace(device="cpu", gather=lambda figures: figures)
    timer.trainer = SimpleNamespace(accelerator=accelerator)
    control = SimpleNamespace(should_training_stop=False)
    timer.on_train_begin()
    units = 0
    for seconds in seconds_of_units:
        with recorder.inside("forward"):
            clock.now += seconds
        counts.loss_tokens += TOKENS
        timer.on_step_end(None, None, control)
        units += 1
        if control.should_training_stop:
            break
    return timer.speed, units


@pytest.mark.parametrize(
    ("settling", "units", "cycle_seconds", "left_out", "steady"),
    [
        # The first is the planned warm-up. 4 s then 2 s differ, 2 s then 1.9 s are alike.
        (2, [9, 4, 2, 1.9, 2.1, 7], [2, 1.9, 2.1], 1, True),
        # Clocks fall: the later ones are slower.
        (2, [9, 1, 1.3, 1.32, 1.31, 7], [1.3, 1.32, 1.31], 1, True),
        # Alike from the start: nothing more is left out.
        (2, [9, 2, 2.1, 2.6, 7], [2, 2.1, 2.6], 0, True),
        # Never alike: two are left out, and no more.
        (2, [9, 1, 2, 1, 2, 1, 7], [1, 2, 1], 2, False),
        # Not asked for.
        (0, [9, 4, 2, 1.9, 7], [4, 2, 1.9], 0, None),
    ],
)
def test_units_before_a_steady_speed_are_left_out(
    settling: int,
    units: list[float],
    cycle_seconds: list[float],
    left_out: int,
    steady: bool | None,
) -> None:
    speed, ran = timed(units, settling)
    assert speed["cycle_seconds"] == pytest.approx(cycle_seconds)
    assert speed["cycle_loss_tokens"] == [TOKENS] * 3
    assert (speed["left_out_cycles"], speed["steady"]) == (left_out, steady)
    assert ran == 1 + left_out + 3
    # Phases and cycles are read from one clock at one time: no pause falls between them.
    assert speed["phase_seconds"]["forward"] == pytest.approx(sum(cycle_seconds))
    assert sum(speed["phase_seconds"].values()) == pytest.approx(sum(speed["cycle_seconds"]))

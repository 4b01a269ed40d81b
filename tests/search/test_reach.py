"""Early stop of a probe whose candidate cannot become the best."""

from __future__ import annotations

import random

import pytest

from autotune.worker.phase_recorder import out_of_reach


@pytest.mark.parametrize(
    ("rates", "goal", "spread", "hopeless"),
    [
        ([70.0], 150.0, 0.05, True),
        ([100.0], 150.0, 0.05, False),  # one cycle may have been a hiccup
        ([100.0, 60.0], 105.0, 0.05, False),  # and so may one of two
        ([100.0, 99.0], 107.0, 0.05, False),
        ([100.0, 101.0, 99.0, 100.0], 107.0, 0.05, True),  # four tell more than two
        ([60.0, 140.0], 150.0, 0.05, False),  # these scatter more than the machine is known to
        ([100.0, 100.0], 150.0, 0.5, False),
        ([], 100.0, 0.05, False),
        ([0.0], 100.0, 0.05, False),
    ],
)
def test_the_upper_bound_decides(
    rates: list[float],
    goal: float,
    spread: float,
    hopeless: bool,
) -> None:
    assert out_of_reach(rates, goal=goal, spread=spread) is hopeless


def test_what_is_as_fast_as_the_goal_is_rarely_stopped_and_what_is_far_slower_nearly_always() -> (
    None
):
    chance = random.Random(0)

    def share(true_rate: float) -> float:
        stopped = []
        for _ in range(2000):
            stopped.append(
                out_of_reach(
                    [true_rate * chance.lognormvariate(0, 0.05) for _ in range(2)],
                    goal=100.0,
                    spread=0.05,
                )
            )
        return sum(stopped) / len(stopped)

    assert share(100.0) < 0.05
    assert share(80.0) > 0.95

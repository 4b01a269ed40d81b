"""Warnings about the memory margin."""

from __future__ import annotations

import random

import pytest

from autotune.core.units import GIB, MIB
from autotune.integrations.memory_margin import MAX_POINTS, GaugeReading, Margin

LIMIT = 40 * GIB


def reading(peak: float) -> GaugeReading:
    return GaugeReading(peak_bytes=round(peak), limit_bytes=LIMIT, by="GPU 0")


def run(
    peaks: list[float], *, last_step: int | None = 1000, lengths: list[int] | None = None, longest: int | None = None
) -> list[str]:
    margin = Margin(last_step=last_step, longest=longest)
    said: list[str] = []
    held = 0.0
    for step, peak in enumerate(peaks, start=1):
        held = max(held, peak)
        said += margin.look(step, reading(held), lengths[step - 1] if lengths else None)
    return said


def test_a_steady_run_is_left_alone() -> None:
    noise = random.Random(0)
    assert run([20 * GIB + noise.randrange(4 * MIB) for _ in range(300)]) == []


def test_each_narrow_margin_is_reported_once() -> None:
    shares = [0.8, 0.91, 0.92, 0.96, 0.96, 0.985, 0.985, 0.99]
    said = run([share * LIMIT for share in shares])
    assert len(said) == 3
    assert said[0].startswith("3.6 GiB left of 40 GiB, GPU 0") and "1.6 GiB left" in said[1]


def test_growth_that_crosses_the_limit_is_reported_early() -> None:
    growing = [20 * GIB + step * 64 * MIB for step in range(60)]
    (said,) = run(growing)
    assert "grows by 64 MiB (at least 64 MiB) a step" in said and "the run takes 1000" in said
    assert run(growing, last_step=100) == [], "it ends before"
    assert run(growing, last_step=None) == [], "nobody knows how long it takes"


def test_longer_completions_are_carried_on_to_the_longest_allowed() -> None:
    lengths = [100 + 20 * step for step in range(30)]
    peaks = [10 * GIB + length * 32 * MIB for length in lengths]
    (said,) = run(peaks, lengths=lengths, longest=1024, last_step=31)
    assert "with the allowed 1024" in said and "so far) it is at least 42 GiB of 40 GiB" in said
    assert run(peaks, lengths=lengths, longest=720, last_step=31) == [], "at their longest they fit"


def test_one_jump_is_no_trend() -> None:
    assert run([10 * GIB] * 20 + [20 * GIB] * 60) == []


@pytest.mark.parametrize("steps", [10, 1000, 20_000])
def test_a_long_run_takes_no_more_memory_or_time_to_watch(steps: int) -> None:
    margin = Margin(last_step=steps, longest=4096)
    for step in range(1, steps + 1):
        margin.look(step, reading(20 * GIB), step)
    assert len(margin.by_step) <= MAX_POINTS and len(margin.by_length) <= MAX_POINTS
    assert steps < 3 or margin.by_step[-1].steps > steps / 2, "the trend is over the whole run"

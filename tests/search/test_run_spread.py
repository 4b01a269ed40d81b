"""Spread between runs: its prior is that of the committed measurements, and its intervals hold."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from autotune.core.measurement import Speed
from autotune.core.run_statistics import (
    RUN_PER_CYCLE,
    UNKNOWN_DEVIATION,
    RunSpread,
    learn_run_spread,
)
from autotune.search.loop import LONG_PROBE, SHORT_PROBE

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TABLES = ("narrow-transformers", "narrow-vllm", "wide-transformers")


def _table(name: str) -> list[list[Speed]]:
    """Return the runs of each candidate that was measured repeatedly."""
    rows: list[dict[str, Any]] = json.loads(
        (BENCHMARKS / f"results/search/table_{name}.json").read_text()
    )["rows"]
    runs_by_id: dict[str, list[Speed]] = {}
    for row in rows:
        if row["outcome"] == "ok":
            runs_by_id.setdefault(row["id"], []).append(msgspec.convert(row["speed"], Speed))
    return [runs for runs in runs_by_id.values() if len(runs) > 1]


def _between(groups: Iterable[Sequence[float]]) -> float:
    squares, degrees = 0.0, 0
    for group in groups:
        if len(group) > 1:
            logarithms = np.log(group)
            squares += float(((logarithms - logarithms.mean()) ** 2).sum())
            degrees += len(group) - 1
    return math.sqrt(squares / degrees)


def _speed(
    rate: float,
    *,
    cycles: int = 3,
    runs: int = 1,
) -> Speed:
    return Speed(
        completion_tokens=8,
        cycle_seconds=(1.0,) * cycles,
        cycle_loss_tokens=(round(rate),) * cycles,
        prompt_tokens=0,
        phase_seconds={},
        runs=runs,
    )


def _interval(spread: RunSpread, speed: Speed) -> tuple[float, float]:
    """Return the 95 % interval of the candidate's speed, in tokens per second."""
    factor = 1 + spread.half_width(speed)
    return speed.tokens_per_second / factor, speed.tokens_per_second * factor


def _overlaps(
    spread: RunSpread,
    first: Speed,
    second: Speed,
) -> bool:
    (low, high), (other_low, other_high) = _interval(spread, first), _interval(spread, second)
    return max(low, other_low) <= min(high, other_high)


def test_the_prior_is_that_of_the_committed_measurements() -> None:
    sweep = json.loads((BENCHMARKS / "results/demo_sweep.json").read_text())
    swept = _between([row["tokens_per_second"] for row in sweep["candidates"]])
    assert pytest.approx(swept, abs=0.002) == UNKNOWN_DEVIATION
    between, scatter = {}, {}
    for name in TABLES:
        groups = _table(name)
        between[name] = _between([[run.tokens_per_second for run in runs] for runs in groups])
        every_run = itertools.chain(*groups)
        scatter[name] = statistics.median(run.scatter or 0 for run in every_run)
    # The sweep kept no single cycles; its model and space are those of the first table.
    ratios = [swept / scatter[TABLES[0]], *(between[name] / scatter[name] for name in TABLES)]
    assert [round(ratio, 1) for ratio in ratios] == [1.3, 1.7, 3.2, 2.5]
    assert statistics.geometric_mean(ratios) == pytest.approx(RUN_PER_CYCLE, abs=0.05)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("known_groups", [0, 3])
def test_the_intervals_of_two_real_runs_of_one_candidate_overlap(
    name: str, known_groups: int
) -> None:
    """Intervals with the prior alone, and after three candidates were measured repeatedly."""
    groups = _table(name)
    firsts = [runs[:1] for runs in groups[known_groups:]]
    spread = learn_run_spread([*groups[:known_groups], *firsts])
    pairs = []
    for runs in groups:
        pairs.extend(itertools.combinations(runs, 2))
    assert sum(_overlaps(spread, *pair) for pair in pairs) >= 0.95 * len(pairs)


def test_the_intervals_of_a_probe_and_its_confirmation_overlap_in_200_repetitions() -> None:
    sys.path.insert(0, str(BENCHMARKS))
    from tests.benchmarks.test_search import machine_of

    posed, machine = machine_of("qwen2.5-7b-lora-a100-80g", seed=3)
    fitting = []
    for candidate in posed.candidates:
        if machine.mean_speed(candidate) is not None:
            fitting.append(candidate)
    chosen = random.Random(0).sample(fitting, 40)
    overlapping = covering = 0
    for candidate in [*chosen, *chosen, *chosen, *chosen, *chosen]:
        probe, confirmation = (
            machine.measure(candidate, plan).worst for plan in (SHORT_PROBE, LONG_PROBE)
        )
        assert probe is not None
        assert confirmation is not None
        spread = learn_run_spread([[probe, confirmation]])
        overlapping += _overlaps(spread, probe, confirmation)
        low, high = _interval(spread, confirmation)
        covering += low <= (machine.mean_speed(candidate) or 0.0) <= high
    assert overlapping >= 190
    assert covering >= 190


def test_repeated_runs_replace_the_prior() -> None:
    steady = learn_run_spread([[_speed(1000), _speed(1001)]] * 20)
    unsteady = learn_run_spread([[_speed(1000), _speed(1300)]] * 20)
    assert steady.half_width(_speed(1000)) < 0.02 < 0.2 < unsteady.half_width(_speed(1000))
    assert steady.repeats == unsteady.repeats == 20


def test_a_slow_machine_spreads_runs_but_not_their_steps() -> None:
    """Nine runs, each a tenth slower than the one before, without scatter inside: the prior is the
    bound, 0.005. By hand, with log steps of 0.1 and 4 degrees of the prior: squares around the mean
    0.01 · 60 = 0.6, of steps 8 · 0.01 / 2 = 0.04, over 4 + 8.
    """
    runs = [_speed(1000 * math.exp(-0.1 * step)) for step in range(9)]
    spread = learn_run_spread([runs])
    assert spread.deviation == pytest.approx(math.sqrt((4 * 0.005**2 + 0.6) / 12), rel=0.01)
    assert spread.step_deviation == pytest.approx(math.sqrt((4 * 0.005**2 + 0.04) / 12), rel=0.01)


def test_an_interval_is_wider_until_a_run_was_repeated() -> None:
    """By hand, for a deviation of 2 %: t of four degrees is 2.78, so exp(2.78 · 0.02) - 1 = 0.057,
    and with no repeated run exp(2.5 · 2.78 · 0.02) - 1 = 0.149.
    """
    repeated = RunSpread(deviation=0.02, freedom=4, repeats=1, step_deviation=0.02)
    assert repeated.half_width(_speed(1000)) == pytest.approx(0.057, rel=0.03)
    unrepeated = replace(repeated, repeats=0)
    assert unrepeated.half_width(_speed(1000)) == pytest.approx(0.149, rel=0.03)


def test_more_runs_narrow_the_interval_but_more_cycles_of_one_run_do_not() -> None:
    spread = learn_run_spread([[_speed(1000), _speed(1100)]])
    single, long, four = (
        spread.half_width(_speed(1000, **how)) for how in ({}, {"cycles": 50}, {"runs": 4})
    )
    assert single == long > 1.8 * four


def test_one_slow_cycle_does_not_widen_the_interval() -> None:
    hiccup = replace(_speed(1000, cycles=5), cycle_seconds=(1.0, 1.8, 1.0, 1.01, 1.0))
    spread = RunSpread(
        deviation=0.02,
        freedom=20,
        repeats=16,
        step_deviation=0.02,
    )
    assert spread.half_width(hiccup) == pytest.approx(spread.half_width(_speed(1000)))

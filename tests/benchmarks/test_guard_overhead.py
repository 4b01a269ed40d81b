"""The benchmark of the guard's cost: interval, verdict, and what the documentation quotes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from guard_overhead import (  # noqa: E402
    BAR,
    BELOW,
    BLOCKS,
    RESULT,
    Block,
    Centre,
    Part,
    WorkEnd,
    _block,
    centre,
    figures,
    sentence,
    verdict,
)


def test_the_centre_of_three_values() -> None:
    # Means of all pairs, each value with itself too: 1, 1.5, 2, 2.5, 3, 4 -> (2 + 2.5) / 2.
    assert centre([1.0, 2.0, 4.0]) == Centre(
        value=2.25,
        low=1.0,
        high=4.0,
    )


@pytest.mark.parametrize("count, critical", [(10, 8), (15, 25), (20, 52), (25, 89)])
def test_intervals_have_the_published_ranks(count: int, critical: int) -> None:
    """Wilcoxon's table, two-sided 5 %: of all means, so many are left out at each end."""
    values = [float(2**place) for place in range(count)]
    means = sorted((first + second) / 2 for first in values for second in values if first <= second)
    result = centre(values)
    assert (result.low, result.high) == (means[critical], means[-1 - critical])


def test_a_drift_of_the_machine_cancels_and_the_guard_does_not() -> None:
    # Units of 0.1 s that get slower by 4 % over the block; with the guard by 10 % more.
    work, parts, now, cpu = [], [], 0.0, 0.0
    for number, is_guarded in enumerate(BLOCKS[0]):
        parts.append(
            Part(
                is_guarded=is_guarded,
                began=now,
                ended=10.0 * (number + 1),
                guard_cpu_seconds=0.1,
            )
        )
        while now < 10.0 * (number + 1):
            seconds = (0.1 + 0.0001 * now) * (1.1 if is_guarded else 1.0)
            now, cpu = now + seconds, cpu + seconds
            work.append(WorkEnd(at=now, cpu_seconds=cpu))
    block = _block(parts, work)
    assert block.wall_ratio == pytest.approx(1.1, abs=5e-4)
    assert block.cpu_ratio == pytest.approx(block.wall_ratio)


def test_the_cost_is_divided_by_how_much_more_the_guard_did() -> None:
    # Shares of 0.1 and 1.2 %: twelve times the work, and 3 % more time for it.
    own_rate = [Block(wall_ratio=1.02, cpu_ratio=1.0, guard_cpu_share=0.001)] * 3
    sped_up = [Block(wall_ratio=1.03, cpu_ratio=1.0, guard_cpu_share=0.012)] * 3
    result = figures(own_rate, sped_up)
    assert result["more_work"] == pytest.approx(12)
    assert result["wall_ratio"]["value"] == pytest.approx(1.0025)
    assert result["verdict"] == BELOW and result["own_rate"]["wall_ratio"]["value"] == 1.02


def test_the_whole_interval_decides() -> None:
    assert (
        verdict(
            Centre(
                value=1.0,
                low=0.99,
                high=1 + 0.9 * BAR,
            )
        )
        == BELOW
    )
    assert (
        verdict(
            Centre(
                value=1.0,
                low=0.99,
                high=1 + 1.1 * BAR,
            )
        )
        == "undecided around"
    )
    assert (
        verdict(
            Centre(
                value=1.01,
                low=1.006,
                high=1.02,
            )
        )
        == "above"
    )


def test_the_documentation_quotes_the_committed_result() -> None:
    result = json.loads(RESULT.read_text())
    text = " ".join((ROOT / "docs" / "guard.md").read_text().split())
    own_rate, sped_up = (
        [Block(**block) for block in result["blocks"][name]] for name in ("own_rate", "sped_up")
    )
    for name, value in figures(own_rate, sped_up).items():
        assert result[name] == value, name
    assert sentence(result) in text, sentence(result)

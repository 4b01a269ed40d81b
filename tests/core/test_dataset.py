"""Lengths of completions and prompts as they occur."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from autotune.core.dataset import MAX_SAMPLE, TokenLengths


def test_a_lognormal_distribution_has_the_mean_and_the_quantile_asked_for() -> None:
    lengths = TokenLengths.lognormal("x", 600, 1500)
    assert lengths.mean == pytest.approx(600, rel=0.02)
    assert lengths.quantile(0.95) == pytest.approx(1500, rel=0.03)


@pytest.mark.parametrize(("mean", "p95"), [(600, 500), (100, 1000)])
def test_an_impossible_quantile_is_refused(mean: float, p95: float) -> None:
    with pytest.raises(ValueError, match="times its mean"):
        TokenLengths.lognormal("x", mean, p95)


def test_a_long_list_keeps_its_quantiles() -> None:
    lengths = TokenLengths.of("x", range(1, 100_001))
    assert len(lengths.sample) == MAX_SAMPLE
    assert lengths.mean == pytest.approx(50_000, rel=0.01)


def test_the_expected_longest_is_that_of_many_draws() -> None:
    lengths = TokenLengths.lognormal("x", 600, 1500)
    chance = random.Random(0)
    simulated = fmean(max(chance.choice(lengths.sample) for _ in range(16)) for _ in range(4000))
    assert lengths.expected_longest(16) == pytest.approx(simulated, rel=0.03)
    assert lengths.expected_longest(1) == pytest.approx(lengths.mean)


def test_a_draw_has_the_mean_of_the_sample_and_repeats() -> None:
    lengths = TokenLengths.lognormal("x", 600, 1500)
    assert fmean(lengths.draw(64)) == pytest.approx(600, rel=0.05)
    assert lengths.draw(64) == lengths.draw(64) != lengths.draw(64, seed=1)
    assert max(lengths.up_to(700).draw(64)) <= 700

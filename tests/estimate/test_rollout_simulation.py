"""Simulated engine: what any schedule must satisfy, and the scheduler's rules one at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from autotune.estimate.throughput.rollout_simulation import EngineLimits, Pass, Request, Rollout, simulate

ENOUGH = EngineLimits(max_num_seqs=64, max_batched_tokens=4096)


def requests(lengths: Sequence[int], *, prompt: int = 32, group: int = 1) -> list[Request]:
    return [Request(prompt=prompt, completion=length, group=place // group) for place, length in enumerate(lengths)]


def watched(given: Sequence[Request], limits: EngineLimits) -> tuple[Rollout, list[Pass]]:
    passes: list[Pass] = []

    def seconds(one: Pass) -> float:
        passes.append(one)
        return 1.0

    return simulate(given, limits, seconds), passes


def drawn(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randint(1, 200) for _ in range(count)]


def test_all_at_once_take_as_many_passes_as_the_longest_has_tokens() -> None:
    found, _ = watched(requests([5, 80, 200, 1]), ENOUGH)
    assert found.passes == 200 and found.seconds == 200 and found.preemptions == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("blocks", [None, 40, 100])
def test_no_schedule_beats_the_longest_completion_or_the_batch(seed: int, blocks: int | None) -> None:
    lengths = drawn(60, seed)
    limits = EngineLimits(max_num_seqs=8, max_batched_tokens=512, blocks=blocks)
    found, passes = watched(requests(lengths), limits)
    assert found.passes >= max(max(lengths), sum(lengths) / limits.max_num_seqs)
    assert all(one.decoding <= limits.max_num_seqs for one in passes)
    assert all(one.decoding + one.prefilled <= limits.max_batched_tokens for one in passes)
    # Every token but the first of each admission is decoded.
    assert found.mean_decoding * found.passes == sum(lengths) - len(lengths) - found.preemptions


def test_freed_places_are_taken_at_once() -> None:
    limits = EngineLimits(max_num_seqs=2, max_batched_tokens=4096)
    found, _ = watched(requests([10, 100, 90]), limits)
    assert found.passes == 100


def test_long_prompts_are_read_in_chunks() -> None:
    _, passes = watched(requests([1], prompt=1000), EngineLimits(max_num_seqs=1, max_batched_tokens=256))
    assert [one.prefilled for one in passes] == [256, 256, 256, 232]


def test_a_group_reads_the_full_blocks_of_its_prompt_once() -> None:
    alone = watched(requests([4] * 8, prompt=100), ENOUGH)[1]
    together = watched(requests([4] * 8, prompt=100, group=8), ENOUGH)[1]
    assert sum(one.prefilled for one in alone) == 8 * 100
    assert sum(one.prefilled for one in together) == 100 + 7 * (100 - 96)


def test_a_full_cache_preempts_the_last_admitted() -> None:
    tight = EngineLimits(max_num_seqs=8, max_batched_tokens=4096, blocks=30)
    found, _ = watched(requests([100] * 8), tight)
    free, _ = watched(requests([100] * 8), ENOUGH)
    assert found.preemptions > 0 and found.passes > free.passes


def test_passes_computed_at_once_cost_what_single_ones_do() -> None:
    """A cost that is linear in the context: the mean context of equal passes is exact."""
    given = requests(drawn(20, 1))

    def cost(one: Pass) -> float:
        return 1 + 0.1 * one.decoding + 0.001 * one.context + 0.01 * one.prefilled

    one_by_one = EngineLimits(max_num_seqs=20, max_batched_tokens=4096, block_tokens=1, blocks=20 * 232 + 19)
    at_once = simulate(given, EngineLimits(max_num_seqs=20, max_batched_tokens=4096), cost)
    assert simulate(given, one_by_one, cost).seconds == pytest.approx(at_once.seconds)


def test_a_sequence_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        simulate(requests([500]), EngineLimits(max_num_seqs=1, max_batched_tokens=4096, blocks=5), lambda one: 1.0)

"""Rows of TRL's asynchronous GRPO: several rollouts, one after the other, without padding.

A row has a number of tokens (`token_budget`), or a number of rollouts
(`per_device_train_batch_size`). Rollouts of one group share their prompt in a prefix trie, in which
each further branch costs one token (`TreeRow` in `trl.experimental.async_grpo`):

    tokens of n rollouts in g groups     g · prompt + n · completion + (n - g)

Example: a budget of 1000 tokens, prompts of 100, completions of 300, groups of 2. Two rollouts have
100 + 600 + 1 tokens, three have 200 + 900 + 1. Three are the fullest row, with completions of
(1000 - 200 - 1) // 3 = 266 tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.frameworks.base import Settings, count_of


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """Fullest row of a micro-batch."""

    rollouts: int
    groups: int  # prompts
    completion: int  # tokens of each completion


def token_budget(settings: Settings) -> int:
    """Return the most tokens of a row; 0: rollouts are counted. TRL's default is the server's
    window.
    """
    budget = settings.get("token_budget")
    return max(0, budget) if isinstance(budget, int) else window(settings)


def window(settings: Settings) -> int:
    prompt = count_of(settings, "max_prompt_length")
    return prompt + count_of(settings, "max_completion_length")


def rollouts_per_step(settings: Settings, ranks: int) -> int:
    """Return the completions of a rank and micro-step whose rollouts fill their row."""
    if token_budget(settings):
        return fullest_row(settings, ranks).rollouts
    return count_of(settings, "per_device_train_batch_size")


def nearest_accumulation(completions: int, per_micro_step: int) -> int:
    """Return the micro-steps that come closest to a number of completions.

    How many completions fill a token budget depends on their lengths: full rows of the longest ones
    seldom make the number exactly.
    """
    return max(1, round(completions / max(1, per_micro_step)))


def fullest_row(settings: Settings, ranks: int) -> PackedRow:
    """Return the row with the most tokens: of rollouts that fill a budget, else of the longest
    ones.
    """
    budget = token_budget(settings)
    group = max(1, count_of(settings, "num_generations"))
    prompt = count_of(settings, "max_prompt_length")
    longest = max(1, count_of(settings, "max_completion_length"))
    if not budget:
        micro = count_of(settings, "per_device_train_batch_size")
        rollouts, groups = _fullest_by_count(micro, max(1, ranks), group)
        return PackedRow(
            rollouts=rollouts,
            groups=groups,
            completion=longest,
        )
    rollouts = 1
    while _tokens(rollouts, group, prompt, longest) < budget:
        rollouts += 1
    left_for_completions = budget - _tokens(rollouts, group, prompt, 0)
    completion = left_for_completions // rollouts
    if completion < 1 < rollouts:  # another prompt does not fit
        rollouts -= 1
        completion = longest
    return PackedRow(
        rollouts=rollouts,
        groups=math.ceil(rollouts / group),
        completion=max(1, min(longest, completion)),
    )


def _tokens(
    rollouts: int,
    group: int,
    prompt: int,
    completion: int,
) -> int:
    groups = math.ceil(rollouts / group)
    return groups * prompt + rollouts * completion + rollouts - groups


def _fullest_by_count(
    micro: int,
    ranks: int,
    group: int,
) -> tuple[int, int]:
    """Return rollouts and prompts of the fullest row: micro-batches of `micro` x ranks, whole
    groups to a rank.

    Groups arrive one after the other, so that a micro-batch begins anywhere in one. The largest
    is halved while there are fewer than ranks; the largest goes first, to the emptiest rank.
    """
    count = max(1, micro * ranks)
    fullest = (1, 1)
    starts = {batch * count % group for batch in range(group)}
    for start in sorted(starts):
        # 1. Groups of the micro-batch, of which the first and the last may be incomplete.
        first = min(count, group - start)
        whole_groups, last = divmod(count - first, group)
        sizes = [first, *[group] * whole_groups]
        if last:
            sizes.append(last)
        # 2. At least one for each rank.
        while len(sizes) < ranks:
            largest = sizes.pop(sizes.index(max(sizes)))
            sizes += [largest // 2, largest - largest // 2]
        # 3. Rollouts and prompts of each rank's row.
        rows = [(0, 0)] * ranks
        for size in sorted(sizes, reverse=True):
            emptiest = rows.index(min(rows))
            rollouts, prompts = rows[emptiest]
            rows[emptiest] = (rollouts + size, prompts + 1)
        fullest = max(fullest, *rows)
    return fullest

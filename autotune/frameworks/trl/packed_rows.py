"""Rows of TRL's asynchronous GRPO: the rollouts that one rank forwards at a time, without padding.

Written for `TreeRow`, `TokenBudgetBatcher` and `FixedCountBatcher` of TRL 1.16. Rollouts of a prompt
share its tokens, except the last one, of which each has a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.frameworks.base import count_of


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """Fullest row of a micro-batch."""

    rollouts: int
    groups: int  # prompts
    completion: int  # tokens of each completion


def token_budget(settings: Mapping[str, object]) -> int:
    """Return the most tokens of a row; 0: rollouts are counted. TRL's default is the server's window."""
    given = settings.get("token_budget")
    return max(0, given) if isinstance(given, int) else window(settings)


def window(settings: Mapping[str, object]) -> int:
    return count_of(settings, "max_prompt_length") + count_of(settings, "max_completion_length")


def fullest_row(settings: Mapping[str, object], ranks: int) -> PackedRow:
    """Return the row with the most tokens: of rollouts that fill a budget, else of the longest ones."""
    budget, group = token_budget(settings), max(1, count_of(settings, "num_generations"))
    prompt, longest = count_of(settings, "max_prompt_length"), max(1, count_of(settings, "max_completion_length"))
    if not budget:
        rollouts, groups = _fullest_by_count(count_of(settings, "per_device_train_batch_size"), max(1, ranks), group)
        return PackedRow(rollouts=rollouts, groups=groups, completion=longest)
    rollouts = 1
    while _tokens(rollouts, group, prompt, longest) < budget:
        rollouts += 1
    completion = (budget - _tokens(rollouts, group, prompt, 0)) // rollouts
    if completion < 1 < rollouts:  # another prompt does not fit
        rollouts, completion = rollouts - 1, longest
    return PackedRow(rollouts=rollouts, groups=math.ceil(rollouts / group), completion=max(1, min(longest, completion)))


def _tokens(rollouts: int, group: int, prompt: int, completion: int) -> int:
    groups = math.ceil(rollouts / group)
    return groups * prompt + rollouts * completion + rollouts - groups


def _fullest_by_count(each: int, ranks: int, group: int) -> tuple[int, int]:
    """Return rollouts and prompts of the fullest row: micro-batches of `each` x ranks, whole groups to a rank.

    Groups arrive one after the other, so that a micro-batch begins anywhere in one. The largest is halved
    while there are fewer than ranks; the largest goes first, to the emptiest rank."""
    count, fullest = max(1, each * ranks), (1, 1)
    for start in sorted({at * count % group for at in range(group)}):
        first = min(count, group - start)
        sizes = [first, *[group] * ((count - first) // group)]
        sizes += [rest] if (rest := count - sum(sizes)) else []
        while len(sizes) < ranks:
            largest = sizes.pop(sizes.index(max(sizes)))
            sizes += [largest // 2, largest - largest // 2]
        rows = [(0, 0)] * ranks
        for size in sorted(sizes, reverse=True):
            emptiest = rows.index(min(rows))
            rows[emptiest] = (rows[emptiest][0] + size, rows[emptiest][1] + 1)
        fullest = max(fullest, *rows)
    return fullest

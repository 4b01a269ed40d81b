"""Micro-batches of OpenRLHF: rows as stated, or as many as a budget of tokens takes."""

from __future__ import annotations

from autotune.frameworks.base import Values, ceil_divided
from autotune.frameworks.stand_in_step import MicroBatch

TRAINING_BATCH = "train.batch_size"
MICRO_BATCH = "train.micro_batch_size"
ROLLOUT_MICRO_BATCH = "rollout.micro_batch_size"
RING = "ds.ring_attn_size"
TOKEN_BUDGET = "train.max_tokens_per_gpu"
HAS_TOKEN_BUDGET = "train.dynamic_batch_enable"


def micro_batch_of(
    values: Values,
    longest: int,
    groups: int,
) -> MicroBatch:
    """Return the micro-batch. `groups`: number of groups of GPUs, each with rows of its own."""
    if values.is_on(HAS_TOKEN_BUDGET):
        return _micro_batch_of_tokens(values, longest, groups)
    return MicroBatch.of_rows(
        values.count(MICRO_BATCH),
        values.count(ROLLOUT_MICRO_BATCH),
        longest=longest,
        divisor=max(1, values.count(RING)),  # ring attention
    )


def _micro_batch_of_tokens(
    values: Values,
    longest: int,
    groups: int,
) -> MicroBatch:
    """Return the largest micro-batch in the budget; a row over it is a micro-batch of its own."""
    ring = max(1, values.count(RING))
    row_tokens = ceil_divided(longest, ring)
    batch_tokens = ceil_divided(values.count(TRAINING_BATCH), groups) * longest // ring
    tokens = max(row_tokens, min(values.count(TOKEN_BUDGET), batch_tokens))
    score_budget = values.count("rollout.max_tokens_per_gpu") or tokens
    return MicroBatch(
        rows=max(1, tokens * ring // max(1, longest)),
        tokens=tokens,
        score_tokens=max(row_tokens, score_budget),
    )

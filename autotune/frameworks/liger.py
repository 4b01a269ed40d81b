"""Liger's fused loss of supervised rows: the logits of a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.job import Task
from autotune.frameworks.base import MICRO_BATCH, Settings, ceil_divided, count_of
from autotune.frameworks.stand_in_step import LAYER_PARTS, SpecFields


def liger_loss(
    settings: Settings,
    task: Task,
    longest: int,
) -> SpecFields:
    """Return the loss of `use_liger_kernel`; empty without it.

    Logits of a chunk are as large as the hidden states of all tokens, rounded up to a power of 2
    (`liger_kernel/ops/fused_linear_cross_entropy.py`).
    """
    if not settings.get("use_liger_kernel"):
        return {}
    config = task.workload.model.config
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        config = nested
    hidden = max(1, count_of(config, "hidden_size"))
    vocabulary = max(1, count_of(config, "vocab_size"))
    tokens = count_of(settings, MICRO_BATCH) * longest
    chunk_tokens = ceil_divided(tokens, ceil_divided(vocabulary, hidden))
    chunk = 1 << max(0, chunk_tokens - 1).bit_length()
    return {
        "loss": "logprobs_fused",
        "loss_options": {"head": "tokens", "chunk": chunk},
        "same_code_parts": LAYER_PARTS,
    }

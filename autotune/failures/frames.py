"""What the places in a traceback tell: what the memory was for, and which phase it was.

From the innermost outwards, the first place that says something decides: every training step passes through the trainer's
log-probabilities, and yet what ran out there may have been a layer's activations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from autotune.measurement import Phase

_Word = TypeVar("_Word", bound=str)

_CAUSES: tuple[tuple[str, str], ...] = (
    (r"_allocate_kv_cache|initialize_cache|initialize_kv_cache|initialize_from_config|/cache_utils\.py", "kv_cache"),
    (r"_all_gather|gather_deepspeed3_params|GatheredParameters|unwrap_model_for_generation", "zero_gather"),
    (r"model_loader/|create_weights|from_pretrained|_load_pretrained_model|caching_allocator_warmup", "weights"),
    (r"_move_model_to_vllm|sync_weights|merge_adapter|update_named_param|wake_up", "weight_sync"),
    (
        r"fixed_cross_entropy|selective_log_softmax|log_softmax|lm_head|entropy_from_logits|ForCausalLMLoss|logprob|cross_entropy",
        "logits",
    ),
    (
        r"/optim(?:izer)?/|torch/optim|bitsandbytes/optim|deepspeed/runtime/zero/stage.*:step|:_?init\w*_optimizer_states",
        "optimizer",
    ),
    (r"profile_run|determine_available_memory|_dummy_run|capture_model", "engine_startup"),
    (r"/models/\w+/modeling_\w+\.py:(?!__init__)|torch/utils/checkpoint\.py", "activations"),
    (r"_get_per_token_logps", "logits"),
)

_PHASES: tuple[tuple[str, Phase], ...] = (
    (r"_move_model_to_vllm|sync_weights|wake_up|update_named_param|merge_adapter", "sync"),
    (r"torch/autograd/|accelerator\.py:backward|_tensor\.py:backward|engine\.py:backward", "backward"),
    (
        r"torch/optim/|bitsandbytes/optim|/optimizer\.py:step|deepspeed/runtime/zero/stage\w*\.py:step|:_?init\w*_optimizer_states",
        "optimizer",
    ),
    (r":_calculate_rewards", "reward"),
    (
        r":_generate_single_turn|/generation/utils\.py|vllm_generation\.py:generate|/llm\.py:generate|:generate_sequences",
        "rollout",
    ),
    (r":_generate_and_score_completions|:compute_log_prob|:compute_ref_log_prob", "score"),
    (r":_?compute_loss|:training_step|:update_actor|:update_policy", "forward"),
    (
        (
            r"from_pretrained|model_loader/|:load_model|_initialize_kv_caches|determine_available_memory|profile_run|capture_model"
            r"|:initialize_from_config|(?:llm|core|trainer|vllm_generation)\.py:__init__|:init_model"
        ),
        "load",
    ),
)


def cause_of(frames: Sequence[str]) -> str | None:
    """What the memory was for, by frames of which the last is the innermost."""
    return _first(frames, _CAUSES)


def phase_of(frames: Sequence[str]) -> Phase | None:
    """Which phase it was."""
    return _first(frames, _PHASES)


def _first(frames: Sequence[str], table: Sequence[tuple[str, _Word]]) -> _Word | None:
    for frame in reversed(frames):
        for pattern, word in table:
            if re.search(pattern, frame):
                return word
    return None

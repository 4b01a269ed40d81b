"""Values of settings whose steps allocate the same.

A trained file states many numbers that a step computes with, and that no allocation depends on. One
value stands for all of them, so that one step model serves them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SETTINGS_WITHOUT_EFFECT = frozenset(
    """
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_ratio warmup_steps weight_decay
    seed data_seed dataset_num_proc tf32 vllm_server_base_url vllm_server_host vllm_server_port
    vllm_server_timeout
    adam_beta1 adam_beta2 adam_epsilon epsilon epsilon_high
    temperature top_p top_k min_p repetition_penalty
    mask_truncated_completions scale_rewards reward_weights importance_sampling_level
    """.split()
)
"""Numbers that a step computes with, and allocates nothing for; the last line decides a few numbers
of a row, or of a token, where the logits have one for each word of the vocabulary.
"""

STATED_DEFAULTS: Mapping[str, object] = {
    "loss_type": "nll",
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
"""Settings whose value is the trainer's own default wherever it is legal: SFT's loss, and how all
supported releases of TRL recompute activations.
"""

AVERAGES = frozenset(("grpo", "bnpo", "dr_grpo", "dapo"))
"""Losses that differ in the number by which a sum over the tokens is divided."""

AVERAGE = "dapo"  # TRL's default stands for all of them

SOME_BETA = 0.1  # any factor of the distance to the reference that is not 0
SOME_DROPOUT = 0.05
ADAPTER_WITHOUT_EFFECT = frozenset({"lora_alpha"})

EVERY_PROJECTION = "all-linear"
LINEAR_NAMES = frozenset("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split())
DEFAULT_NAMES = frozenset(("q_proj", "v_proj"))  # PEFT's own targets of the same model types
PLAIN_LAYERS = frozenset(("qwen2", "qwen3", "llama", "mistral", "gemma3_text"))
"""Model types whose layers have these linear modules and no others."""


def same_settings(settings: Mapping[str, Any]) -> Mapping[str, object]:
    """Return what decides a step, of settings without those of its point."""
    deciding: dict[str, object] = {}
    for name, value in settings.items():
        if name not in SETTINGS_WITHOUT_EFFECT and STATED_DEFAULTS.get(name) != value:
            deciding[name] = value

    loss = deciding.get("loss_type")
    if isinstance(loss, str) and loss in AVERAGES:  # DPO has lists of losses
        deciding["loss_type"] = AVERAGE
    if deciding.get("beta"):
        deciding["beta"] = SOME_BETA
    if deciding.get("max_grad_norm"):
        del deciding["max_grad_norm"]  # gradients are clipped by default
    return deciding


def same_adapter(adapter: Mapping[str, Any], model_type: str | None) -> Mapping[str, object]:
    """Return what decides the adapter's step in a model of this type."""
    deciding = {}
    for name, value in adapter.items():
        if name not in ADAPTER_WITHOUT_EFFECT:
            deciding[name] = value

    if deciding.get("lora_dropout"):
        deciding["lora_dropout"] = SOME_DROPOUT
    targets = deciding.get("lora_target_modules")
    if isinstance(targets, list | tuple | set | frozenset):
        deciding["lora_target_modules"] = _same_targets(frozenset(targets), model_type)
    return deciding


def _same_targets(names: frozenset[str], model_type: str | None) -> object:
    """Return the same modules as they are most often stated; None: PEFT's own."""
    if model_type in PLAIN_LAYERS and names == LINEAR_NAMES:
        return EVERY_PROJECTION
    if model_type in PLAIN_LAYERS and names == DEFAULT_NAMES:
        return None
    return sorted(names)

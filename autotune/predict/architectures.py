"""Architectures: how each departs from Llama's layer. One row each; the arithmetic is in `shapes`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Traits:
    """How an architecture departs from Llama's layer."""

    query_bias: bool | str = False
    """Whether query, key and value projections have a bias; a name is the config's own switch."""

    output_bias: bool | str = False
    mlp_bias: bool | str = False
    norms: int = 2
    """Norms of the hidden width in a layer."""

    head_norms: bool = False
    """Norms on each head of queries and keys."""

    row_norms: bool = False
    """Norms on all heads of queries, and of keys, at once."""

    norm_bias: bool = False
    gated: bool = True
    """Whether the MLP has a gate: three matrices, and not two."""

    sinks: bool = False
    """A learnt score per head for attending to nothing."""

    learned_positions: bool = False

    tied: bool = False
    """Whether the head is the embedding where the config does not say."""

    head_dim: int | None = None
    """Where the config does not say and it is not hidden / heads."""

    key_value_heads: int | None = None
    experts: tuple[str, str, str] | None = None
    """The config's words for: how many experts, how many per token, how wide."""

    expert_bias: bool = False
    """Biases on the experts and on their router."""

    shared: bool = False
    """A dense MLP beside the experts."""

    shared_gate: bool = False
    latent: bool = False
    windows: str = "none"
    """`all` layers have the config's window, `switched` by use_sliding_window, or a pattern of `every` n-th without."""

    every: int = 0


_MOE_QWEN = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_MOE_MIXTRAL = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
_MOE_DEEPSEEK = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
ATTENTION_BIAS = "attention_bias"
TRAITS: Mapping[str, Traits] = {
    "llama": Traits(query_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS, mlp_bias="mlp_bias"),
    "mistral": Traits(windows="all", key_value_heads=8),
    "qwen2": Traits(query_bias=True, windows="switched"),
    "qwen3": Traits(query_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS, head_norms=True, head_dim=128, windows="switched"),
    "gemma": Traits(query_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS, tied=True, head_dim=256),
    "gemma2": Traits(
        query_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        norms=4,
        tied=True,
        head_dim=256,
        windows="pattern",
        every=2,
    ),
    "gemma3_text": Traits(
        query_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        norms=4,
        head_norms=True,
        tied=True,
        head_dim=256,
        windows="pattern",
        every=6,
    ),
    "phi3": Traits(windows="all"),
    "granite": Traits(query_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS, mlp_bias="mlp_bias"),
    "smollm3": Traits(query_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS, mlp_bias="mlp_bias", tied=True, windows="switched"),
    "mixtral": Traits(experts=_MOE_MIXTRAL, windows="all", key_value_heads=8),
    "qwen2_moe": Traits(query_bias="qkv_bias", experts=_MOE_QWEN, shared=True, shared_gate=True, windows="switched"),
    "qwen3_moe": Traits(
        query_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        head_norms=True,
        experts=_MOE_QWEN,
        windows="switched",
    ),
    "granitemoe": Traits(query_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS, experts=_MOE_MIXTRAL),
    "olmo2": Traits(query_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS, row_norms=True),
    "gpt_oss": Traits(
        query_bias=True,
        output_bias=True,
        sinks=True,
        head_dim=64,
        key_value_heads=8,
        experts=_MOE_MIXTRAL,
        expert_bias=True,
        windows="pattern",
        every=2,
    ),
    "gpt_bigcode": Traits(
        query_bias=True, output_bias=True, mlp_bias=True, norm_bias=True, gated=False, learned_positions=True, tied=True
    ),
    "deepseek_v2": Traits(latent=True, experts=_MOE_DEEPSEEK, shared=True),
    "deepseek_v3": Traits(latent=True, experts=_MOE_DEEPSEEK, shared=True),
}

OTHER_WORDS: Mapping[str, Mapping[str, str]] = {
    "gpt_bigcode": {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    }
}
"""Configs that call things by other names."""

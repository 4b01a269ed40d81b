"""Gemma 4: wider heads without a value projection in full-attention layers, caches shared by the
last layers, an embedding per layer, and experts beside the MLP."""

from __future__ import annotations

from autotune.estimate.config_fields import Config, layer_kind, number

FULL_HEAD_DIM = 512


def attention(config: Config, index: int) -> dict[str, int]:
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    head, groups = number(config, "head_dim", 256), number(config, "num_key_value_heads")
    same = False  # values are the keys
    if layer_kind(config, index) == "full_attention":
        same = bool(config.get("attention_k_eq_v"))
        groups = number(config, "num_global_key_value_heads", groups) if same else groups
        head = number(config, "global_head_dim", FULL_HEAD_DIM)
    query, one = heads * head, groups * head
    shared = shares_cache(config, index)
    key_value = 0 if shared else hidden * one * (1 if same else 2)
    return {
        "split": 2 * hidden * query,
        "key_value": key_value,
        "copied": head if shared else 2 * head,
        "matrices": 2 * hidden * query + key_value,
        "cached": 0 if shared else 2 * one,
        "cache_heads": groups,
    }


def shares_cache(config: Config, index: int) -> bool:
    return index >= number(config, "num_hidden_layers") - number(config, "num_kv_shared_layers", 0)


def mlp_width(config: Config, index: int) -> int:
    double = bool(config.get("use_double_wide_mlp")) and shares_cache(config, index)
    return number(config, "intermediate_size") * (2 if double else 1)


def per_layer_input(config: Config) -> int:
    """Matrices of the layer's gate and projection of its own embedding: 2 · d · p."""
    return 2 * number(config, "hidden_size") * number(config, "hidden_size_per_layer_input", 0)


def norms(config: Config) -> int:
    """Norms and scales of the layer beside attention's."""
    hidden = number(config, "hidden_size")
    count = 4 + bool(config.get("hidden_size_per_layer_input")) + 3 * bool(config.get("enable_moe_block"))
    router = hidden + number(config, "num_experts") if config.get("enable_moe_block") else 0
    return count * hidden + router


def outside_layers(config: Config) -> int:
    """Embeddings per layer with their projection and norm."""
    width = number(config, "hidden_size_per_layer_input", 0)
    every = number(config, "num_hidden_layers") * width
    vocabulary = number(config, "vocab_size_per_layer_input", number(config, "vocab_size"))
    return (vocabulary + number(config, "hidden_size")) * every + width

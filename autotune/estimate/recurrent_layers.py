"""Layers with a state of fixed size per sequence instead of a cache: gated delta nets and Mamba 2.

d: hidden size, k = key heads · key width, v = value heads · value width, c: channels of the
convolution. vLLM stores the last inputs of the convolution, (kernel - 1) · c elements, in the
model's dtype.
"""

from __future__ import annotations

from autotune.estimate.config_fields import Config, layer_kind, number, numbers

RECURRENT = ("linear_attention", "mamba")  # entries of `layer_types` without a cache of keys and values


def is_recurrent(config: Config, index: int) -> bool:
    kind = layer_kind(config, index)
    if kind is not None:
        return kind in RECURRENT
    interval = config.get("full_attention_interval")
    return "linear_num_value_heads" in config and (index + 1) % (interval if isinstance(interval, int) else 4) != 0


def recurrent_layer(config: Config) -> dict[str, int]:
    """Return the fields of the token mixer, as attention's."""
    parts = _mamba2(config) if "mamba_n_heads" in config else _delta_net(config)
    return {**parts, "key_value": 0, "cached": 0, "cache_heads": 1}


def _delta_net(config: Config) -> dict[str, int]:
    """In: 2k + 2v + two gates per value head. Out: v."""
    hidden = number(config, "hidden_size")
    heads, width = numbers(config, "linear_num_value_heads", "linear_value_head_dim")
    key_heads, key_width = numbers(config, "linear_num_key_heads", "linear_key_head_dim")
    keys, values = key_heads * key_width, heads * width
    channels, kernel = 2 * keys + values, number(config, "linear_conv_kernel_dim", 4)
    matrices = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
    return {
        "split": matrices + channels * kernel + 2 * heads,
        "copied": width,
        "matrices": matrices,
        **_state(channels * (kernel - 1), heads * width * key_width, wide=config.get("mamba_ssm_dtype") == "float32"),
    }


def _mamba2(config: Config) -> dict[str, int]:
    """In: inner + c + one step size per head. Out: inner."""
    hidden, heads, width, groups = numbers(config, "hidden_size", "mamba_n_heads", "mamba_d_head", "mamba_n_groups")
    state, kernel = number(config, "mamba_d_state"), number(config, "mamba_d_conv")
    inner = heads * width
    channels = inner + 2 * groups * state
    matrices = hidden * (inner + channels + heads) + inner * hidden
    biases = (inner + channels + heads + hidden) * bool(config.get("mamba_proj_bias"))
    convolution = channels * (kernel + bool(config.get("mamba_conv_bias", True)))
    return {
        "split": matrices + biases + convolution + 3 * heads + inner,
        "copied": 0,
        "matrices": matrices,
        **_state(channels * (kernel - 1), inner * state, wide=False),
    }


def _state(inputs: int, state: int, *, wide: bool) -> dict[str, int]:
    """Return elements per sequence in the model's dtype, and in float32."""
    return {"state": inputs if wide else inputs + state, "wide_state": state if wide else 0}

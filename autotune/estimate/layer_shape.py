"""Decoder layers from a config.json: parameters, cache per token, widths.

Architectures differ in a few traits (biases, norms, experts, latent attention, windows), listed in
architectures.yaml; the rest is arithmetic. A test compares the sums with transformers' own models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import msgspec

from autotune.core.errors import BadInput
from autotune.core.yaml_document import packaged_table

Config = Mapping[str, object]


def number(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int):
        raise BadInput(
            f"The model's config states no {name}.",
            way_out="Give the whole config.json of the model.",
        )
    return value


def numbers(config: Config, *names: str) -> tuple[int, ...]:
    return tuple(number(config, name) for name in names)


def switch(config: Config, trait: bool | str) -> int:
    """Return a trait as a factor, 1 or 0. A string names the config's own switch."""
    return int(trait if isinstance(trait, bool) else bool(config.get(trait, trait == "qkv_bias")))


def layer_kind(config: Config, index: int) -> str | None:
    """Return the layer's entry in `layer_types`; None if the config has no such list."""
    kinds = config.get("layer_types")
    return str(kinds[index]) if isinstance(kinds, (list, tuple)) else None


class Traits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Departures of one architecture. A string trait names the config's own switch."""

    query_bias: bool | str = False  # biases of the query, key and value projections
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    norms: int = 2  # norms of the hidden width per layer
    head_norms: bool | str = False  # norms per head of queries and keys
    row_norms: bool = False  # norms over all heads of queries, and of keys
    norm_bias: bool = False
    gated: bool = True  # gated MLP: three matrices instead of two
    sinks: bool = False  # one learned attention-sink score per head
    learned_positions: bool = False
    tied: bool = False  # head = embedding, unless the config states it
    head_dim: int | None = None  # default if it is not hidden / heads
    key_value_heads: int | None = None  # default if it is not the number of heads
    experts: tuple[str, str, str] | None = (
        None  # config fields: number of experts, per token, width
    )
    expert_bias: bool = False  # biases of experts and router
    shared: bool = False  # dense MLP beside the experts
    shared_gate: bool = False
    latent: bool = False  # DeepSeek's latent attention
    gated_query: bool = False  # the query projection computes a gate of the result, too
    recurrent: bool = False  # some layers have a state instead of a cache
    gemma4: bool = (
        False  # wider heads, shared caches, an embedding per layer: see `_gemma4_attention`
    )
    dense_width: str | None = (
        None  # config field: width of a dense MLP, if it is not intermediate_size
    )
    shared_width: str | None = None  # config field: width of the dense MLP beside the experts
    # `all` layers, `switched` by use_sliding_window, or `pattern`: every n-th layer without
    windows: str = "none"
    every: int = 0  # that n


class Architectures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    traits: Mapping[str, Traits]
    field_names: Mapping[str, Mapping[str, str]]


@cache
def architectures() -> Architectures:
    return packaged_table("autotune.estimate", "architectures.yaml", Architectures)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Decoder layer. Counts are of parameters unless stated otherwise."""

    split: int  # divided among the ranks by tensor parallelism
    key_value: int  # key and value projections: divided by whole heads
    copied: int  # on every rank: norms, routers, the down projections of latent attention
    experts: int = 0  # of `split`: all routed experts
    experts_used: int = 0  # of `experts`: those of one token
    matrices: int  # in linear layers, which quantisation applies to; routers excluded
    width: int  # intermediate size of the dense or shared MLP; 0: routed experts alone
    expert_width: int = 0  # intermediate size of one routed expert
    experts_per_token: int = 0
    cached: int  # elements per token in an engine's cache
    cache_heads: (
        int  # heads that tensor parallelism divides the cache by; 1: a latent, on every rank
    )
    window: int | None  # tokens of sliding-window attention; None: unlimited
    state: int = (
        0  # elements per sequence of a recurrent layer, which has no cache; in the model's dtype
    )
    wide_state: int = 0  # the same in float32

    @property
    def parameters(self) -> int:
        return self.split + self.key_value + self.copied

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.parameters - self.experts + self.experts_used


def decoder_layer(config: Config, traits: Traits, index: int) -> Layer:
    if traits.recurrent and _is_recurrent(config, index):
        attention = _mamba2(config) if "mamba_n_heads" in config else _delta_net(config)
    elif traits.gemma4:
        attention = _gemma4_attention(config, index)
    else:
        attention = (
            _latent_attention(config, index) if traits.latent else _attention(config, traits)
        )
    mlp = _mlp(config, traits, index)
    norms = traits.norms * number(config, "hidden_size") * (2 if traits.norm_bias else 1)
    both = {name: attention[name] + mlp.pop(name) for name in ("split", "copied", "matrices")}
    both["copied"] += _gemma4_norms(config) if traits.gemma4 else norms
    return Layer(
        **{**attention, **mlp, **both},
        window=None if "state" in attention else _window(config, traits, index),
    )


def _attention(config: Config, traits: Traits) -> dict[str, int]:
    hidden, head_dim, heads = (
        number(config, "hidden_size"),
        own_head_dim(config, traits),
        number(config, "num_attention_heads"),
    )
    query, key_value = heads * head_dim, 2 * own_key_value_heads(config, traits) * head_dim
    bias, products = switch(config, traits.query_bias), 3 if traits.gated_query else 2
    norms = (
        2 * head_dim * switch(config, traits.head_norms)
        + (query + key_value // 2) * traits.row_norms
    )
    return {
        "split": products * hidden * query + bias * (products - 1) * query + heads * traits.sinks,
        "key_value": hidden * key_value + bias * key_value,
        "copied": switch(config, traits.output_bias) * hidden + norms,
        "matrices": products * hidden * query + hidden * key_value,
        "cached": key_value,
        "cache_heads": own_key_value_heads(config, traits),
    }


def _latent_attention(config: Config, index: int) -> dict[str, int]:
    """DeepSeek's attention: keys and values come from one latent per token, which is cached, as is
    the key of the indexer that selects tokens in sparse attention."""
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    rope, nope = number(config, "qk_rope_head_dim"), number(config, "qk_nope_head_dim")
    value, latent = number(config, "v_head_dim"), number(config, "kv_lora_rank")
    rank = config.get("q_lora_rank")
    rank = rank if isinstance(rank, int) else 0
    down = hidden * (latent + rope) + hidden * rank
    up = (
        (rank or hidden) * heads * (rope + nope)
        + latent * heads * (nope + value)
        + heads * value * hidden
    )
    biases = switch(config, "attention_bias") * (latent + rope + rank + hidden)
    kinds, index_heads, key = config.get("indexer_types"), 0, 0
    if "index_head_dim" in config and not (
        isinstance(kinds, list) and kinds[index] == "shared"
    ):  # an earlier layer's
        index_heads, key = numbers(config, "index_n_heads", "index_head_dim")
    selection = index_heads * key * rank + hidden * (key + index_heads)
    return {
        "split": up,
        "key_value": 0,
        "copied": down + biases + latent + rank + selection + 2 * key,
        "matrices": up + down + selection,
        "cached": latent + rope + key,
        "cache_heads": 1,
    }


def _mlp(config: Config, traits: Traits, index: int) -> dict[str, int]:
    sparse = _is_sparse(config, traits, index)
    # experts beside a dense MLP, which no token leaves out; gate and projection of the layer's own
    # embedding
    if traits.gemma4:
        double = bool(config.get("use_double_wide_mlp")) and _shares_cache(config, index)
        dense = _dense(
            {
                **config,
                "intermediate_size": number(config, "intermediate_size") * (2 if double else 1),
            },
            traits,
        )
        own = 2 * number(config, "hidden_size") * number(config, "hidden_size_per_layer_input", 0)
        experts = _experts(config, traits) if sparse else {}
        both = {
            name: dense[name] + experts.get(name, 0) for name in ("split", "copied", "matrices")
        }
        return {
            **experts,
            **both,
            "split": both["split"] + own,
            "matrices": both["matrices"] + own,
            "width": dense["width"],
        }
    if sparse:
        return _experts(config, traits)
    stated = "intermediate_size" if traits.dense_width is None else traits.dense_width
    return _dense({**config, "intermediate_size": number(config, stated)}, traits)


def _dense(config: Config, traits: Traits) -> dict[str, int]:
    hidden, width = number(config, "hidden_size"), number(config, "intermediate_size")
    bias, halves = switch(config, traits.mlp_bias), 2 if traits.gated else 1
    matrices = (halves + 1) * hidden * width
    return {
        "split": matrices + bias * halves * width,
        "copied": bias * hidden,
        "matrices": matrices,
        "width": width,
    }


def _experts(config: Config, traits: Traits) -> dict[str, int]:
    assert traits.experts is not None
    count, used, width, hidden = numbers(config, *traits.experts, "hidden_size")
    shared_width = _shared_width(config, traits)
    expert, shared = (
        3 * hidden * width + (2 * width + hidden) * traits.expert_bias,
        3 * hidden * shared_width,
    )
    gates = (hidden + traits.expert_bias) * count + (hidden if traits.shared_gate else 0)
    return {
        "split": count * expert + shared,
        "copied": gates,
        "matrices": 3 * count * hidden * width + shared,
        "width": shared_width,
        "experts": count * expert,
        "experts_used": used * expert,
        "expert_width": width,
        "experts_per_token": used,
    }


def _shared_width(config: Config, traits: Traits) -> int:
    if traits.shared_width is not None:
        return number(config, traits.shared_width)
    if not traits.shared:
        return 0
    if "shared_expert_intermediate_size" in config:
        return number(config, "shared_expert_intermediate_size")
    shared = config.get("n_shared_experts")
    return (shared if isinstance(shared, int) else 0) * number(config, "moe_intermediate_size")


def _is_sparse(config: Config, traits: Traits, index: int) -> bool:
    if traits.experts is None or not config.get(traits.experts[0]):
        return False
    kinds, chosen = config.get("mlp_layer_types"), config.get("moe_layers")
    if isinstance(kinds, (list, tuple)):
        return bool(kinds[index] == "sparse")
    if isinstance(chosen, (list, tuple)):
        return index in chosen
    if traits.latent or "first_k_dense_replace" in config:
        return index >= number(config, "first_k_dense_replace", 0)
    dense = config.get("mlp_only_layers")
    step = number(config, "decoder_sparse_step", number(config, "interleave_moe_layer_step", 1))
    return not (isinstance(dense, (list, tuple)) and index in dense) and (index + 1) % step == 0


def _window(config: Config, traits: Traits, index: int) -> int | None:
    window = config.get("sliding_window")
    if not isinstance(window, int) or traits.windows == "none":
        return None
    kind = layer_kind(config, index)
    if kind is not None:
        return window if kind == "sliding_attention" else None
    if traits.windows == "all":
        return window
    if traits.windows == "switched":
        used = bool(config.get("use_sliding_window", False)) and index >= number(
            config, "max_window_layers", 0
        )
        return window if used else None
    return window if (index + 1) % number(config, "sliding_window_pattern", traits.every) else None


def own_head_dim(config: Config, traits: Traits) -> int:
    stated = config.get("head_dim")
    if isinstance(stated, int):
        return stated
    return traits.head_dim or number(config, "hidden_size") // number(config, "num_attention_heads")


def own_key_value_heads(config: Config, traits: Traits) -> int:
    return number(
        config,
        "num_key_value_heads",
        traits.key_value_heads or number(config, "num_attention_heads"),
    )


# Gemma 4.

FULL_HEAD_DIM = 512


def _gemma4_attention(config: Config, index: int) -> dict[str, int]:
    """Wider heads without a value projection in full-attention layers, caches shared by the last
    layers.
    """
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    head, groups = number(config, "head_dim", 256), number(config, "num_key_value_heads")
    same = False  # values are the keys
    if layer_kind(config, index) == "full_attention":
        same = bool(config.get("attention_k_eq_v"))
        groups = number(config, "num_global_key_value_heads", groups) if same else groups
        head = number(config, "global_head_dim", FULL_HEAD_DIM)
    query, one = heads * head, groups * head
    shared = _shares_cache(config, index)
    key_value = 0 if shared else hidden * one * (1 if same else 2)
    return {
        "split": 2 * hidden * query,
        "key_value": key_value,
        "copied": head if shared else 2 * head,
        "matrices": 2 * hidden * query + key_value,
        "cached": 0 if shared else 2 * one,
        "cache_heads": groups,
    }


def _shares_cache(config: Config, index: int) -> bool:
    return index >= number(config, "num_hidden_layers") - number(config, "num_kv_shared_layers", 0)


def _gemma4_norms(config: Config) -> int:
    """Norms and scales of the layer beside attention's."""
    hidden = number(config, "hidden_size")
    count = (
        4
        + bool(config.get("hidden_size_per_layer_input"))
        + 3 * bool(config.get("enable_moe_block"))
    )
    router = hidden + number(config, "num_experts") if config.get("enable_moe_block") else 0
    return count * hidden + router


def layer_embeddings(config: Config) -> int:
    """Embeddings per layer with their projection and norm."""
    width = number(config, "hidden_size_per_layer_input", 0)
    every = number(config, "num_hidden_layers") * width
    vocabulary = number(config, "vocab_size_per_layer_input", number(config, "vocab_size"))
    return (vocabulary + number(config, "hidden_size")) * every + width


# Layers with a state of fixed size per sequence instead of a cache: gated delta nets and Mamba 2.
#
# d: hidden size, k = key heads * key width, v = value heads * value width, c: channels of the
# convolution. vLLM stores the last inputs of the convolution, (kernel - 1) * c elements, in the
# model's dtype.

RECURRENT = (
    "linear_attention",
    "mamba",
)  # entries of `layer_types` without a cache of keys and values


def _is_recurrent(config: Config, index: int) -> bool:
    kind = layer_kind(config, index)
    if kind is not None:
        return kind in RECURRENT
    interval = config.get("full_attention_interval")
    return (
        "linear_num_value_heads" in config
        and (index + 1) % (interval if isinstance(interval, int) else 4) != 0
    )


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
        **_state(
            channels * (kernel - 1),
            heads * width * key_width,
            wide=config.get("mamba_ssm_dtype") == "float32",
        ),
    }


def _mamba2(config: Config) -> dict[str, int]:
    """In: inner + c + one step size per head. Out: inner."""
    hidden, heads, width, groups = numbers(
        config, "hidden_size", "mamba_n_heads", "mamba_d_head", "mamba_n_groups"
    )
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
    """Return elements per sequence in the model's dtype, and in float32; there is no cache."""
    own = {"state": inputs if wide else inputs + state, "wide_state": state if wide else 0}
    return {**own, "key_value": 0, "cached": 0, "cache_heads": 1}

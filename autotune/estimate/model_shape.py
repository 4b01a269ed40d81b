"""Shape of a model from its config.json: parameters by group, cache per token, widths.

Architectures differ in a few traits (biases, norms, experts, latent attention, windows), listed in
architectures.yaml; the rest is arithmetic. A test compares the sums with transformers' own models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property

import msgspec

from autotune.core.errors import BadInput
from autotune.core.yaml_document import packaged_table
from autotune.estimate import gemma4_layers
from autotune.estimate.config_fields import Config, number, numbers, switch
from autotune.estimate.recurrent_layers import is_recurrent, recurrent_layer
from autotune.estimate.vision_towers import tower_parameters

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


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
    experts: tuple[str, str, str] | None = None  # config fields: number of experts, per token, width
    expert_bias: bool = False  # biases of experts and router
    shared: bool = False  # dense MLP beside the experts
    shared_gate: bool = False
    latent: bool = False  # DeepSeek's latent attention
    gated_query: bool = False  # the query projection computes a gate of the result, too
    recurrent: bool = False  # some layers have a state instead of a cache: `recurrent_layers`
    gemma4: bool = False  # layers of `gemma4_layers`
    dense_width: str | None = None  # config field: width of a dense MLP, if it is not intermediate_size
    shared_width: str | None = None  # config field: width of the dense MLP beside the experts
    windows: str = "none"  # `all` layers, `switched` by use_sliding_window, or `pattern`: every n-th layer without
    every: int = 0  # that n


class _Architectures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    traits: Mapping[str, Traits]
    field_names: Mapping[str, Mapping[str, str]]


@cache
def architectures() -> _Architectures:
    return packaged_table("autotune.estimate", "architectures.yaml", _Architectures)


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
    cache_heads: int  # heads that tensor parallelism divides the cache by; 1: a latent, on every rank
    window: int | None  # tokens of sliding-window attention; None: unlimited
    state: int = 0  # elements per sequence of a recurrent layer, which has no cache; in the model's dtype
    wide_state: int = 0  # the same in float32

    @property
    def parameters(self) -> int:
        return self.split + self.key_value + self.copied

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.parameters - self.experts + self.experts_used


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Decoder described by a config."""

    kind: str  # transformers' model_type
    layers: tuple[Layer, ...]
    embedding: int
    final_norm: int
    head: int  # parameters of the output projection; 0: tied to the embedding
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    positions: int  # longest supported sequence
    rotary_rows: int  # positions, over all tables, with rotary embeddings in an engine
    rotary_dim: int
    towers: int = 0  # parameters of vision and audio towers and their projections
    layer_embeddings: int = 0  # Gemma 4: embeddings of every layer, with their projection
    unfolded: int  # elements of keys and values per token and layer as attention reads them; > cached for a latent

    def __hash__(self) -> int:
        """Return a stored hash: shapes key caches that are read thousands of times."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def kinds(self) -> tuple[tuple[Layer, int], ...]:
        """Distinct layers and their counts."""
        return tuple(Counter(self.layers).items())

    @property
    def parameters(self) -> int:
        outside = self.embedding + self.layer_embeddings + self.head + self.final_norm + self.towers
        return outside + sum(layer.parameters for layer in self.layers)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses, its embedding row excluded."""
        return self.head + self.final_norm + sum(layer.active for layer in self.layers)


_recent: list[tuple[dict[str, object], Shape]] = []


def shape(config: Config) -> Shape:
    """Return the shape of the config's language model. The last four are cached."""
    for known, found in _recent:
        if known == config:
            return found
    made = _shape(config)
    _recent[:] = [(dict(config), made), *_recent[:3]]
    return made


def _shape(config: Config) -> Shape:
    towers = tower_parameters(config)
    config = text_config(config)
    # 1. GPT-BigCode's field names, and the fields that it leaves out.
    names = architectures().field_names.get(str(config.get("model_type")))
    if names is not None:
        usual: dict[str, object] = {name: config[other] for name, other in names.items() if config.get(other) is not None}
        usual.setdefault("intermediate_size", 4 * number(usual, "hidden_size"))
        usual["num_key_value_heads"] = 1 if config.get("multi_query", True) else usual["num_attention_heads"]
        config = {**config, **usual}
    # 2. The architecture's traits.
    known = architectures().traits
    traits = known.get(str(config.get("model_type")))
    if traits is None:
        raise BadInput(
            f"No shape is known for the architecture {config.get('model_type')!r}.",
            way_out=f"Known are {', '.join(sorted(known))}.",
        )
    # 3. Widths.
    hidden, vocabulary = number(config, "hidden_size"), number(config, "vocab_size")
    positions = number(config, "max_position_embeddings", 2048)
    layers = tuple(_layer(config, traits, index) for index in range(number(config, "num_hidden_layers")))
    heads, head_dim = number(config, "num_attention_heads"), _head_dim(config, traits)
    key_value_heads, factor = _key_value_heads(config, traits), config.get("partial_rotary_factor")
    rotary_dim = int(head_dim * (factor if isinstance(factor, (int, float)) else 1))
    unfolded = 2 * key_value_heads * head_dim
    if traits.latent:
        rotary_dim = number(config, "qk_rope_head_dim")
        unfolded = heads * (number(config, "qk_nope_head_dim") + rotary_dim + number(config, "v_head_dim"))
    return Shape(
        kind=str(config["model_type"]),
        layers=layers,
        embedding=vocabulary * hidden + (positions * hidden if traits.learned_positions else 0),
        layer_embeddings=gemma4_layers.outside_layers(config) if traits.gemma4 else 0,
        final_norm=hidden * (2 if traits.norm_bias else 1),
        towers=towers,
        head=0 if bool(config.get("tie_word_embeddings", traits.tied)) else vocabulary * hidden,
        hidden=hidden,
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        positions=positions,
        rotary_rows=_rotary_rows(config, positions, two_tables=traits.every == 6),
        rotary_dim=rotary_dim,
        unfolded=unfolded,
    )


def text_config(config: Config) -> Config:
    """Return the language part of a multimodal config; any other unchanged. Qwen2.5-VL has it at the top."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return {**config, "model_type": f"{config.get('model_type')}_text"} if "vision_config" in config else config
    kind = {"gemma3": "gemma3_text"}.get(str(config.get("model_type")), str(inner.get("model_type", config.get("model_type"))))
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return {**tied, **inner, "model_type": kind}


def dtype_bytes(dtype: str) -> int:
    """Return bytes per element of a dtype, named with or without `torch.`."""
    name = dtype.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise BadInput(f"The precision {dtype!r} is not known.", way_out=f"Known are {', '.join(DTYPE_BYTES)}.")
    return DTYPE_BYTES[name]


def _layer(config: Config, traits: Traits, index: int) -> Layer:
    if traits.recurrent and is_recurrent(config, index):
        attention = recurrent_layer(config)
    elif traits.gemma4:
        attention = gemma4_layers.attention(config, index)
    else:
        attention = _latent_attention(config, index) if traits.latent else _attention(config, traits)
    mlp = _mlp(config, traits, index)
    norms = traits.norms * number(config, "hidden_size") * (2 if traits.norm_bias else 1)
    both = {name: attention[name] + mlp.pop(name) for name in ("split", "copied", "matrices")}
    both["copied"] += gemma4_layers.norms(config) if traits.gemma4 else norms
    return Layer(**{**attention, **mlp, **both}, window=None if "state" in attention else _window(config, traits, index))


def _mlp(config: Config, traits: Traits, index: int) -> dict[str, int]:
    sparse = _is_sparse(config, traits, index)
    if traits.gemma4:  # experts beside a dense MLP, which no token leaves out
        dense = _dense({**config, "intermediate_size": gemma4_layers.mlp_width(config, index)}, traits)
        experts, own = _experts(config, traits) if sparse else {}, gemma4_layers.per_layer_input(config)
        both = {name: dense[name] + experts.get(name, 0) for name in ("split", "copied", "matrices")}
        return {**experts, **both, "split": both["split"] + own, "matrices": both["matrices"] + own, "width": dense["width"]}
    if sparse:
        return _experts(config, traits)
    stated = "intermediate_size" if traits.dense_width is None else traits.dense_width
    return _dense({**config, "intermediate_size": number(config, stated)}, traits)


def _attention(config: Config, traits: Traits) -> dict[str, int]:
    hidden, head_dim, heads = number(config, "hidden_size"), _head_dim(config, traits), number(config, "num_attention_heads")
    query, key_value = heads * head_dim, 2 * _key_value_heads(config, traits) * head_dim
    bias, products = switch(config, traits.query_bias), 3 if traits.gated_query else 2
    norms = 2 * head_dim * switch(config, traits.head_norms) + (query + key_value // 2) * traits.row_norms
    return {
        "split": products * hidden * query + bias * (products - 1) * query + heads * traits.sinks,
        "key_value": hidden * key_value + bias * key_value,
        "copied": switch(config, traits.output_bias) * hidden + norms,
        "matrices": products * hidden * query + hidden * key_value,
        "cached": key_value,
        "cache_heads": _key_value_heads(config, traits),
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
    up = (rank or hidden) * heads * (rope + nope) + latent * heads * (nope + value) + heads * value * hidden
    biases = switch(config, "attention_bias") * (latent + rope + rank + hidden)
    kinds, index_heads, key = config.get("indexer_types"), 0, 0
    if "index_head_dim" in config and not (isinstance(kinds, list) and kinds[index] == "shared"):  # an earlier layer's
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


def _dense(config: Config, traits: Traits) -> dict[str, int]:
    hidden, width = number(config, "hidden_size"), number(config, "intermediate_size")
    bias, halves = switch(config, traits.mlp_bias), 2 if traits.gated else 1
    matrices = (halves + 1) * hidden * width
    return {"split": matrices + bias * halves * width, "copied": bias * hidden, "matrices": matrices, "width": width}


def _experts(config: Config, traits: Traits) -> dict[str, int]:
    assert traits.experts is not None
    count, used, width, hidden = numbers(config, *traits.experts, "hidden_size")
    shared_width = _shared_width(config, traits)
    expert, shared = 3 * hidden * width + (2 * width + hidden) * traits.expert_bias, 3 * hidden * shared_width
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
    kinds = config.get("layer_types")
    if isinstance(kinds, (list, tuple)):
        return window if kinds[index] == "sliding_attention" else None
    if traits.windows == "all":
        return window
    if traits.windows == "switched":
        used = bool(config.get("use_sliding_window", False)) and index >= number(config, "max_window_layers", 0)
        return window if used else None
    return window if (index + 1) % number(config, "sliding_window_pattern", traits.every) else None


def _rotary_rows(config: Config, positions: int, *, two_tables: bool) -> int:
    """Return the rows of vLLM's rotary tables; long-context variants have one table per range."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    kind = scaling.get("rope_type", scaling.get("type"))
    original = scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    factor = scaling.get("factor")
    if kind == "longrope" and isinstance(original, int):
        return original + positions
    if kind == "yarn" and isinstance(original, int) and isinstance(factor, (int, float)):
        return int(original * factor)
    return 2 * positions if two_tables else positions


def _head_dim(config: Config, traits: Traits) -> int:
    stated = config.get("head_dim")
    if isinstance(stated, int):
        return stated
    return traits.head_dim or number(config, "hidden_size") // number(config, "num_attention_heads")


def _key_value_heads(config: Config, traits: Traits) -> int:
    return number(config, "num_key_value_heads", traits.key_value_heads or number(config, "num_attention_heads"))

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


class Traits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Departures of one architecture. A string trait names the config's own switch."""

    query_bias: bool | str = False  # biases of the query, key and value projections
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    norms: int = 2  # norms of the hidden width per layer
    head_norms: bool = False  # norms per head of queries and keys
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
    windows: str = "none"  # `all` layers, `switched` by use_sliding_window, or `pattern`: every n-th layer without
    every: int = 0  # that n


class _Architectures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    traits: Mapping[str, Traits]
    field_names: Mapping[str, Mapping[str, str]]


@cache
def architectures() -> _Architectures:
    return packaged_table("autotune.estimate", "architectures.yaml", _Architectures)


Config = Mapping[str, object]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


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
    towers: int = 0  # parameters of a vision tower and its projection
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
        return self.embedding + self.head + self.final_norm + self.towers + sum(layer.parameters for layer in self.layers)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses, its embedding row excluded."""
        return self.head + self.final_norm + sum(layer.active for layer in self.layers)

    @property
    def cached_per_token(self) -> int:
        """Cache elements per token over all layers, windows ignored."""
        return sum(layer.cached for layer in self.layers)


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
    towers = _towers(config)
    config = _with_usual_names(text_config(config))
    known = architectures().traits
    traits = known.get(str(config.get("model_type")))
    if traits is None:
        raise BadInput(
            f"No shape is known for the architecture {config.get('model_type')!r}.",
            way_out=f"Known are {', '.join(sorted(known))}.",
        )
    hidden, vocabulary = _number(config, "hidden_size"), _number(config, "vocab_size")
    positions = _number(config, "max_position_embeddings", 2048)
    return Shape(
        kind=str(config["model_type"]),
        layers=tuple(_layer(config, traits, index) for index in range(_number(config, "num_hidden_layers"))),
        embedding=vocabulary * hidden + (positions * hidden if traits.learned_positions else 0),
        final_norm=hidden * (2 if traits.norm_bias else 1),
        towers=towers,
        head=0 if bool(config.get("tie_word_embeddings", traits.tied)) else vocabulary * hidden,
        hidden=hidden,
        heads=_number(config, "num_attention_heads"),
        key_value_heads=_key_value_heads(config, traits),
        head_dim=_head_dim(config, traits),
        vocabulary=vocabulary,
        positions=positions,
        rotary_rows=_rotary_rows(config, positions, two_tables=traits.every == 6),
        rotary_dim=_rotary_dim(config, traits),
        unfolded=_unfolded(config, traits),
    )


def text_config(config: Config) -> Config:
    """Return the language part of a multimodal config; any other unchanged."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    kind = {"gemma3": "gemma3_text"}.get(str(config.get("model_type")), str(inner.get("model_type", config.get("model_type"))))
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return {**tied, **inner, "model_type": kind}


def _with_usual_names(config: Config) -> Config:
    """Translate GPT-BigCode's field names, and add the fields that it leaves out."""
    names = architectures().field_names.get(str(config.get("model_type")))
    if names is None:
        return config
    usual: dict[str, object] = {name: config[other] for name, other in names.items() if config.get(other) is not None}
    usual.setdefault("intermediate_size", 4 * _number(usual, "hidden_size"))
    usual["num_key_value_heads"] = 1 if config.get("multi_query", True) else usual["num_attention_heads"]
    return {**config, **usual}


def _towers(config: Config) -> int:
    """Return the parameters of SigLIP's vision tower with Gemma's projection."""
    vision, text = config.get("vision_config"), config.get("text_config")
    if not isinstance(vision, Mapping) or not isinstance(text, Mapping):
        return 0
    if vision.get("model_type") != "siglip_vision_model":
        raise BadInput(
            f"No shape is known for the vision tower {vision.get('model_type')!r}.",
            way_out="Give the language model's config alone.",
        )
    hidden, width, patch = (_number(vision, name) for name in ("hidden_size", "intermediate_size", "patch_size"))
    side = _number(vision, "image_size") // patch
    patches = hidden * (_number(vision, "num_channels", 3) * patch * patch + 1) + side * side * hidden
    layer = 4 * hidden * (hidden + 1) + 2 * hidden * width + width + hidden + 4 * hidden
    projection = hidden * _number(text, "hidden_size") + hidden
    return patches + _number(vision, "num_hidden_layers") * layer + 2 * hidden + projection


def dtype_bytes(dtype: str) -> int:
    """Return bytes per element of a dtype, named with or without `torch.`."""
    name = dtype.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise BadInput(f"The precision {dtype!r} is not known.", way_out=f"Known are {', '.join(DTYPE_BYTES)}.")
    return DTYPE_BYTES[name]


def _layer(config: Config, traits: Traits, index: int) -> Layer:
    attention = _latent_attention(config) if traits.latent else _attention(config, traits)
    mlp = _experts(config, traits) if _is_sparse(config, traits, index) else _dense(config, traits)
    norms = traits.norms * _number(config, "hidden_size") * (2 if traits.norm_bias else 1)
    both = {name: attention[name] + mlp.pop(name) for name in ("split", "copied", "matrices")}
    both["copied"] += norms
    return Layer(**{**attention, **mlp, **both}, window=_window(config, traits, index))


def _attention(config: Config, traits: Traits) -> dict[str, int]:
    hidden, head_dim, heads = _number(config, "hidden_size"), _head_dim(config, traits), _number(config, "num_attention_heads")
    query, key_value = heads * head_dim, 2 * _key_value_heads(config, traits) * head_dim
    bias = _switch(config, traits.query_bias)
    norms = 2 * head_dim * traits.head_norms + (query + key_value // 2) * traits.row_norms
    return {
        "split": 2 * hidden * query + bias * query + heads * traits.sinks,
        "key_value": hidden * key_value + bias * key_value,
        "copied": _switch(config, traits.output_bias) * hidden + norms,
        "matrices": 2 * hidden * query + hidden * key_value,
        "cached": key_value,
        "cache_heads": _key_value_heads(config, traits),
    }


def _latent_attention(config: Config) -> dict[str, int]:
    """DeepSeek's attention: keys and values come from one latent per token, which is cached."""
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    rope, nope = _number(config, "qk_rope_head_dim"), _number(config, "qk_nope_head_dim")
    value, latent = _number(config, "v_head_dim"), _number(config, "kv_lora_rank")
    rank = config.get("q_lora_rank")
    rank = rank if isinstance(rank, int) else 0
    down = hidden * (latent + rope) + hidden * rank
    up = (rank or hidden) * heads * (rope + nope) + latent * heads * (nope + value) + heads * value * hidden
    biases = _switch(config, "attention_bias") * (latent + rope + rank + hidden)
    return {
        "split": up,
        "key_value": 0,
        "copied": down + biases + latent + rank,
        "matrices": up + down,
        "cached": latent + rope,
        "cache_heads": 1,
    }


def _dense(config: Config, traits: Traits) -> dict[str, int]:
    hidden, width = _number(config, "hidden_size"), _number(config, "intermediate_size")
    bias = _switch(config, traits.mlp_bias)
    halves = 2 if traits.gated else 1
    matrices = (halves + 1) * hidden * width
    return {"split": matrices + bias * halves * width, "copied": bias * hidden, "matrices": matrices, "width": width}


def _experts(config: Config, traits: Traits) -> dict[str, int]:
    assert traits.experts is not None
    count, used, width = (_number(config, name) for name in traits.experts)
    hidden = _number(config, "hidden_size")
    shared_width = _shared_width(config) if traits.shared else 0
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


def _shared_width(config: Config) -> int:
    if "shared_expert_intermediate_size" in config:
        return _number(config, "shared_expert_intermediate_size")
    shared = config.get("n_shared_experts")
    return (shared if isinstance(shared, int) else 0) * _number(config, "moe_intermediate_size")


def _is_sparse(config: Config, traits: Traits, index: int) -> bool:
    if traits.experts is None:
        return False
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, (list, tuple)):
        return bool(kinds[index] == "sparse")
    if traits.latent:
        return index >= _number(config, "first_k_dense_replace", 0)
    dense = config.get("mlp_only_layers")
    step = _number(config, "decoder_sparse_step", 1)
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
        used = bool(config.get("use_sliding_window", False)) and index >= _number(config, "max_window_layers", 0)
        return window if used else None
    return window if (index + 1) % _number(config, "sliding_window_pattern", traits.every) else None


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


def _unfolded(config: Config, traits: Traits) -> int:
    if not traits.latent:
        return 2 * _key_value_heads(config, traits) * _head_dim(config, traits)
    widths = (_number(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return _number(config, "num_attention_heads") * sum(widths)


def _rotary_dim(config: Config, traits: Traits) -> int:
    if traits.latent:
        return _number(config, "qk_rope_head_dim")
    factor = config.get("partial_rotary_factor")
    return int(_head_dim(config, traits) * (factor if isinstance(factor, (int, float)) else 1))


def _head_dim(config: Config, traits: Traits) -> int:
    stated = config.get("head_dim")
    if isinstance(stated, int):
        return stated
    return traits.head_dim or _number(config, "hidden_size") // _number(config, "num_attention_heads")


def _key_value_heads(config: Config, traits: Traits) -> int:
    return _number(config, "num_key_value_heads", traits.key_value_heads or _number(config, "num_attention_heads"))


def _switch(config: Config, trait: bool | str) -> int:
    """Return 1 or 0, as a factor."""
    return int(trait if isinstance(trait, bool) else bool(config.get(trait, trait == "qkv_bias")))


def _number(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int):
        raise BadInput(f"The model's config states no {name}.", way_out="Give the whole config.json of the model.")
    return value

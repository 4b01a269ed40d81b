"""Shapes: what follows from a model's config.json alone: parameters by group, the cache per token, the widths.

Architectures differ in a few traits (biases, norms, experts, latent attention, windows), which `architectures` lists;
everything else is arithmetic. A test holds the sums against the models that transformers itself builds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from autotune.errors import BadInput
from autotune.predict.architectures import ATTENTION_BIAS, OTHER_WORDS, TRAITS, Traits

Config = Mapping[str, object]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer."""

    split: int
    """Parameters that tensor parallelism divides among its ranks."""

    key_value: int
    """Parameters of the key and value projections: divided by heads, and a head is never cut."""

    copied: int
    """Parameters of which every rank has all: norms, routers, latent attention's way down."""

    experts: int = 0
    """Of `split`: the routed experts, all of them."""

    experts_used: int = 0
    """Of `experts`: what one token passes through."""

    matrices: int
    """Parameters in linear layers, which is what gets quantised; routers stay as they are."""

    width: int
    """Intermediate size of the dense or shared MLP; 0 where a layer has routed experts alone."""

    expert_width: int = 0
    """Intermediate size of one routed expert."""

    experts_per_token: int = 0

    cached: int
    """Elements that one token leaves in the cache of an engine."""

    cache_heads: int
    """Heads that the cache is divided by under tensor parallelism; 1 where it is a latent that every rank keeps."""

    window: int | None
    """Tokens that attention looks back, where that is bounded."""

    @property
    def parameters(self) -> int:
        return self.split + self.key_value + self.copied

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.parameters - self.experts + self.experts_used


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder, as its config describes it."""

    kind: str
    """transformers' model_type."""

    layers: tuple[Layer, ...]
    embedding: int
    final_norm: int
    head: int
    """Parameters of the output projection; 0 where it is the embedding."""

    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    """The longest sequence that the model was made for."""

    rotary_rows: int
    """Positions, over all its tables, for which an engine keeps rotary embeddings."""

    rotary_dim: int

    towers: int = 0
    """Parameters beside the language model: a vision tower and its way into it."""

    unfolded: int
    """Elements per token and layer of keys and values as attention reads them: more than is cached where a latent is."""

    def __hash__(self) -> int:
        """Looked up once: what follows from a shape is kept by it, and asked for thousands of times."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def kinds(self) -> tuple[tuple[Layer, int], ...]:
        """Layers that differ, and how many there are of each: most often all are alike."""
        return tuple(Counter(self.layers).items())

    @property
    def parameters(self) -> int:
        return self.embedding + self.head + self.final_norm + self.towers + sum(layer.parameters for layer in self.layers)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses, the embedding's single row left out of account."""
        return self.head + self.final_norm + sum(layer.active for layer in self.layers)

    @property
    def cached_per_token(self) -> int:
        """Elements that one token leaves in all layers' caches, windows not looked at."""
        return sum(layer.cached for layer in self.layers)


_recent: list[tuple[dict[str, object], Shape]] = []


def shape(config: Config) -> Shape:
    """The shape of the language model that this config describes. A search asks for the same one thousands of times."""
    for known, found in _recent:
        if known == config:
            return found
    made = _shape(config)
    _recent[:] = [(dict(config), made), *_recent[:3]]
    return made


def _shape(config: Config) -> Shape:
    towers = _towers(config)
    config = _in_plain_words(text_config(config))
    traits = TRAITS.get(str(config.get("model_type")))
    if traits is None:
        raise BadInput(
            f"No shape is known for the architecture {config.get('model_type')!r}.",
            way_out=f"Known are {', '.join(sorted(TRAITS))}.",
        )
    hidden, vocabulary = _number(config, "hidden_size"), _number(config, "vocab_size")
    heads = _number(config, "num_attention_heads")
    positions = _number(config, "max_position_embeddings", 2048)
    tied = bool(config.get("tie_word_embeddings", traits.tied))
    return Shape(
        kind=str(config["model_type"]),
        layers=tuple(_layer(config, traits, index) for index in range(_number(config, "num_hidden_layers"))),
        embedding=vocabulary * hidden + (positions * hidden if traits.learned_positions else 0),
        final_norm=hidden * (2 if traits.norm_bias else 1),
        towers=towers,
        head=0 if tied else vocabulary * hidden,
        hidden=hidden,
        heads=heads,
        key_value_heads=_key_value_heads(config, traits),
        head_dim=_head_dim(config, traits),
        vocabulary=vocabulary,
        positions=positions,
        rotary_rows=_rotary_rows(config, positions, two_tables=traits.every == 6),
        rotary_dim=_rotary_dim(config, traits),
        unfolded=_unfolded(config, traits),
    )


def text_config(config: Config) -> Config:
    """A multimodal config's language part; any other as it is."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    kind = {"gemma3": "gemma3_text"}.get(str(config.get("model_type")), str(inner.get("model_type", config.get("model_type"))))
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return {**tied, **inner, "model_type": kind}


def _in_plain_words(config: Config) -> Config:
    """GPT-BigCode's config says it all in other words, and leaves out what follows from the rest."""
    words = OTHER_WORDS.get(str(config.get("model_type")))
    if words is None:
        return config
    plain: dict[str, object] = {plain: config[other] for plain, other in words.items() if config.get(other) is not None}
    plain.setdefault("intermediate_size", 4 * _number(plain, "hidden_size"))
    plain["num_key_value_heads"] = 1 if config.get("multi_query", True) else plain["num_attention_heads"]
    return {**config, **plain}


def _towers(config: Config) -> int:
    """SigLIP's vision tower with Gemma's projection into the language model, where the config has one."""
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
    """Bytes of one element; spelt with or without torch's name in front."""
    name = dtype.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise BadInput(f"The precision {dtype!r} is not known.", way_out=f"Known are {', '.join(DTYPE_BYTES)}.")
    return DTYPE_BYTES[name]


def _layer(config: Config, traits: Traits, index: int) -> Layer:
    attention = _latent_attention(config) if traits.latent else _attention(config, traits)
    mlp = _experts(config, traits) if _is_sparse(config, traits, index) else _dense(config, traits)
    norms = traits.norms * _number(config, "hidden_size") * (2 if traits.norm_bias else 1)
    return Layer(
        split=attention["split"] + mlp["split"],
        key_value=attention["key_value"],
        copied=attention["copied"] + mlp["copied"] + norms,
        experts=mlp["experts"],
        experts_used=mlp["experts_used"],
        matrices=attention["matrices"] + mlp["matrices"],
        width=mlp["width"],
        expert_width=mlp["expert_width"],
        experts_per_token=mlp["experts_per_token"],
        cached=attention["cached"],
        cache_heads=attention["cache_heads"],
        window=_window(config, traits, index),
    )


def _attention(config: Config, traits: Traits) -> dict[str, int]:
    hidden, head_dim = _number(config, "hidden_size"), _head_dim(config, traits)
    query = _number(config, "num_attention_heads") * head_dim
    key_value = 2 * _key_value_heads(config, traits) * head_dim
    bias = _switch(config, traits.query_bias)
    matrices = 2 * hidden * query + hidden * key_value
    norms = 2 * head_dim * traits.head_norms + (query + key_value // 2) * traits.row_norms
    return {
        "split": 2 * hidden * query + bias * query + _number(config, "num_attention_heads") * traits.sinks,
        "key_value": hidden * key_value + bias * key_value,
        "copied": _switch(config, traits.output_bias) * hidden + norms,
        "matrices": matrices,
        "cached": key_value,
        "cache_heads": _key_value_heads(config, traits),
    }


def _latent_attention(config: Config) -> dict[str, int]:
    """DeepSeek's: keys and values come from one latent per token, and the latent is what is cached."""
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    rope, nope = _number(config, "qk_rope_head_dim"), _number(config, "qk_nope_head_dim")
    value, latent = _number(config, "v_head_dim"), _number(config, "kv_lora_rank")
    bias = _switch(config, ATTENTION_BIAS)
    rank = config.get("q_lora_rank")
    rank = rank if isinstance(rank, int) else 0
    down = hidden * (latent + rope) + hidden * rank
    up = (rank or hidden) * heads * (rope + nope) + latent * heads * (nope + value) + heads * value * hidden
    biases = bias * (latent + rope + rank + hidden)
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
    return _mlp(split=matrices + bias * halves * width, copied=bias * hidden, matrices=matrices, width=width)


def _experts(config: Config, traits: Traits) -> dict[str, int]:
    assert traits.experts is not None
    count, used, width = (_number(config, name) for name in traits.experts)
    hidden = _number(config, "hidden_size")
    shared = _shared_width(config) if traits.shared else 0
    expert, beside = 3 * hidden * width + (2 * width + hidden) * traits.expert_bias, 3 * hidden * shared
    gates = (hidden + traits.expert_bias) * count + (hidden if traits.shared_gate else 0)
    return _mlp(
        split=count * expert + beside,
        copied=gates,
        matrices=3 * count * hidden * width + beside,
        width=shared,
        experts=count * expert,
        experts_used=used * expert,
        expert_width=width,
        experts_per_token=used,
    )


def _mlp(**figures: int) -> dict[str, int]:
    return {"experts": 0, "experts_used": 0, "expert_width": 0, "experts_per_token": 0} | figures


def _shared_width(config: Config) -> int:
    if "shared_expert_intermediate_size" in config:
        return _number(config, "shared_expert_intermediate_size")
    shared = config.get("n_shared_experts")
    return (shared if isinstance(shared, int) else 0) * _number(config, "moe_intermediate_size")


def _is_sparse(config: Config, traits: Traits, index: int) -> bool:
    if traits.experts is None:
        return False
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
    """Rows of the rotary tables that vLLM keeps: long-context variants keep one for each range."""
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
    """1 or 0, so that it can be multiplied with."""
    if isinstance(trait, bool):
        return int(trait)
    return int(bool(config.get(trait, trait == "qkv_bias")))


def _number(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int):
        raise BadInput(f"The model's config states no {name}.", way_out="Give the whole config.json of the model.")
    return value

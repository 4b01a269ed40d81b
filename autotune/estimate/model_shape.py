"""Shape of a model from its config.json: parameters by group, cache per token, widths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from autotune.core.errors import BadInput
from autotune.estimate.layer_shape import (
    Config,
    Layer,
    architectures,
    decoder_layer,
    layer_embeddings,
    number,
    own_head_dim,
    own_key_value_heads,
)
from autotune.estimate.vision import tower_parameters

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


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
    # elements of keys and values per token and layer as attention reads them; > cached for a latent
    unfolded: int

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
        usual: dict[str, object] = {
            name: config[other] for name, other in names.items() if config.get(other) is not None
        }
        usual.setdefault("intermediate_size", 4 * number(usual, "hidden_size"))
        usual["num_key_value_heads"] = (
            1 if config.get("multi_query", True) else usual["num_attention_heads"]
        )
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
    layers = tuple(
        decoder_layer(config, traits, index) for index in range(number(config, "num_hidden_layers"))
    )
    heads, head_dim = number(config, "num_attention_heads"), own_head_dim(config, traits)
    key_value_heads, factor = (
        own_key_value_heads(config, traits),
        config.get("partial_rotary_factor"),
    )
    rotary_dim = int(head_dim * (factor if isinstance(factor, (int, float)) else 1))
    unfolded = 2 * key_value_heads * head_dim
    if traits.latent:
        rotary_dim = number(config, "qk_rope_head_dim")
        unfolded = heads * (
            number(config, "qk_nope_head_dim") + rotary_dim + number(config, "v_head_dim")
        )
    return Shape(
        kind=str(config["model_type"]),
        layers=layers,
        embedding=vocabulary * hidden + (positions * hidden if traits.learned_positions else 0),
        layer_embeddings=layer_embeddings(config) if traits.gemma4 else 0,
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
    """Return the language part of a multimodal config; any other unchanged. Qwen2.5-VL has it at
    the top.
    """
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return (
            {**config, "model_type": f"{config.get('model_type')}_text"}
            if "vision_config" in config
            else config
        )
    kind = {"gemma3": "gemma3_text"}.get(
        str(config.get("model_type")), str(inner.get("model_type", config.get("model_type")))
    )
    tied = (
        {"tie_word_embeddings": config["tie_word_embeddings"]}
        if "tie_word_embeddings" in config
        else {}
    )
    return {**tied, **inner, "model_type": kind}


def dtype_bytes(dtype: str) -> int:
    """Return bytes per element of a dtype, named with or without `torch.`."""
    name = dtype.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise BadInput(
            f"The precision {dtype!r} is not known.", way_out=f"Known are {', '.join(DTYPE_BYTES)}."
        )
    return DTYPE_BYTES[name]


def _rotary_rows(config: Config, positions: int, *, two_tables: bool) -> int:
    """Return the rows of vLLM's rotary tables; long-context variants have one table per range."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    kind = scaling.get("rope_type", scaling.get("type"))
    original = scaling.get("original_max_position_embeddings") or config.get(
        "original_max_position_embeddings"
    )
    factor = scaling.get("factor")
    if kind == "longrope" and isinstance(original, int):
        return original + positions
    if kind == "yarn" and isinstance(original, int) and isinstance(factor, (int, float)):
        return int(original * factor)
    return 2 * positions if two_tables else positions

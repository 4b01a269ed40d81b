"""Decoder layers from a config.json: parameters, cache per token, widths.

Architectures differ in a few traits (biases, norms, experts, latent attention, windows), listed in
architectures.yaml; the rest is arithmetic. A test compares the sums with transformers' own models.

    layer = attention (attention_shape.py) + MLP (mlp_shape.py) + norms
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.estimate.attention_shape import attention
from autotune.estimate.mlp_shape import mlp
from autotune.estimate.model_config import Config, Traits, layer_kind, number


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


def decoder_layer(
    config: Config,
    traits: Traits,
    index: int,
) -> Layer:
    """Return the layer with this index."""
    attends = attention(config, traits, index)
    feeds = mlp(config, traits, index)
    window = None
    if not attends.recurrent and _slides(config, traits, index):
        window = number(config, "sliding_window")
    return Layer(
        split=attends.split + feeds.split,
        key_value=attends.key_value,
        copied=attends.copied + feeds.copied + _norms(config, traits),
        experts=feeds.experts,
        experts_used=feeds.experts_used,
        matrices=attends.matrices + feeds.matrices,
        width=feeds.width,
        expert_width=feeds.expert_width,
        experts_per_token=feeds.experts_per_token,
        cached=attends.cached,
        cache_heads=attends.cache_heads,
        window=window,
        state=attends.state,
        wide_state=attends.wide_state,
    )


def _norms(config: Config, traits: Traits) -> int:
    """Return the norms of the layer beside attention's; of Gemma 4 with scales and the router."""
    hidden = number(config, "hidden_size")
    if not traits.gemma4:
        per_norm = 2 if traits.norm_bias else 1
        return traits.norms * hidden * per_norm
    norms, router = 4, 0
    if config.get("hidden_size_per_layer_input"):
        norms += 1
    if config.get("enable_moe_block"):
        norms += 3
        router = hidden + number(config, "num_experts")
    return norms * hidden + router


def _slides(
    config: Config,
    traits: Traits,
    index: int,
) -> bool:
    """Return True if the layer's attention has a window."""
    if not isinstance(config.get("sliding_window"), int) or traits.windows == "none":
        return False
    kind = layer_kind(config, index)
    if kind is not None:
        return kind == "sliding_attention"
    if traits.windows == "all":
        return True
    if traits.windows == "switched":
        if not config.get("use_sliding_window", False):
            return False
        return index >= number(config, "max_window_layers", 0)
    return (index + 1) % number(config, "sliding_window_pattern", traits.every) != 0


def layer_embeddings(config: Config) -> int:
    """Return Gemma 4's embeddings of every layer, with their projection and norm."""
    width = number(config, "hidden_size_per_layer_input", 0)
    in_all_layers = number(config, "num_hidden_layers") * width
    vocabulary = number(config, "vocab_size_per_layer_input", number(config, "vocab_size"))
    return (vocabulary + number(config, "hidden_size")) * in_all_layers + width

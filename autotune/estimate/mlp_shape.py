"""Parameters of a decoder layer's MLP: dense, or experts with a dense one beside them.

dense    (2 or 3 matrices) · hidden · width
experts  count · 3 · hidden · width, a router, and the dense MLP of all tokens
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune.estimate.attention_shape import shares_cache
from autotune.estimate.model_config import Config, Traits, number, numbers, switch


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """Counts are of parameters unless stated otherwise; `layer_shape.Layer` explains them."""

    split: int
    copied: int
    matrices: int
    width: int
    experts: int = 0
    experts_used: int = 0
    expert_width: int = 0
    experts_per_token: int = 0


def mlp(
    config: Config,
    traits: Traits,
    index: int,
) -> Mlp:
    """Return the MLP of the layer with this index."""
    is_sparse = _is_sparse(config, traits, index)
    if traits.gemma4:
        return _gemma4(config, traits, index, is_sparse=is_sparse)
    if is_sparse:
        return _experts(config, traits)
    width = number(config, traits.dense_width or "intermediate_size")
    return _dense(config, traits, width)


def _dense(
    config: Config,
    traits: Traits,
    width: int,
) -> Mlp:
    hidden = number(config, "hidden_size")
    bias = switch(config, traits.mlp_bias)
    into = 2 if traits.gated else 1  # matrices from the hidden size to the width
    matrices = (into + 1) * hidden * width
    return Mlp(
        split=matrices + bias * into * width,
        copied=bias * hidden,
        matrices=matrices,
        width=width,
    )


def _experts(config: Config, traits: Traits) -> Mlp:
    assert traits.experts is not None
    count, used, width, hidden = numbers(config, *traits.experts, "hidden_size")
    shared_width = _shared_width(config, traits)
    shared = 3 * hidden * shared_width
    expert_matrices = 3 * hidden * width
    expert = expert_matrices
    router = hidden * count
    if traits.expert_bias:
        expert += 2 * width + hidden
        router += count
    if traits.shared_gate:
        router += hidden
    return Mlp(
        split=count * expert + shared,
        copied=router,
        matrices=count * expert_matrices + shared,
        width=shared_width,
        experts=count * expert,
        experts_used=used * expert,
        expert_width=width,
        experts_per_token=used,
    )


def _gemma4(
    config: Config,
    traits: Traits,
    index: int,
    *,
    is_sparse: bool,
) -> Mlp:
    """Experts beside a dense MLP, which no token leaves out; gate and projection of the layer's
    own embedding.
    """
    width = number(config, "intermediate_size")
    if config.get("use_double_wide_mlp") and shares_cache(config, index):
        width *= 2
    dense = _dense(config, traits, width)
    embedding = 2 * number(config, "hidden_size")
    embedding *= number(config, "hidden_size_per_layer_input", 0)
    experts = Mlp(
        split=0,
        copied=0,
        matrices=0,
        width=0,
    )
    if is_sparse:
        experts = _experts(config, traits)
    return replace(
        experts,
        split=dense.split + experts.split + embedding,
        copied=dense.copied + experts.copied,
        matrices=dense.matrices + experts.matrices + embedding,
        width=dense.width,
    )


def _shared_width(config: Config, traits: Traits) -> int:
    """Return the width of the dense MLP beside the experts; 0: there is none."""
    if traits.shared_width is not None:
        return number(config, traits.shared_width)
    if not traits.shared:
        return 0
    if "shared_expert_intermediate_size" in config:
        return number(config, "shared_expert_intermediate_size")
    shared = config.get("n_shared_experts")
    count = shared if isinstance(shared, int) else 0
    return count * number(config, "moe_intermediate_size")


def _is_sparse(
    config: Config,
    traits: Traits,
    index: int,
) -> bool:
    """Return True for a layer with experts."""
    if traits.experts is None or not config.get(traits.experts[0]):
        return False
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, (list, tuple)):
        return bool(kinds[index] == "sparse")
    sparse_layers = config.get("moe_layers")
    if isinstance(sparse_layers, (list, tuple)):
        return index in sparse_layers
    if traits.latent or "first_k_dense_replace" in config:
        return index >= number(config, "first_k_dense_replace", 0)
    dense_layers = config.get("mlp_only_layers")
    if isinstance(dense_layers, (list, tuple)) and index in dense_layers:
        return False
    step = number(config, "decoder_sparse_step", number(config, "interleave_moe_layer_step", 1))
    return (index + 1) % step == 0

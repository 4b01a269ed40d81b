"""Architectures as departures from Llama's decoder layer: the loader of architectures.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

import msgspec


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
    import msgspec.yaml

    text = resources.files("autotune.estimate").joinpath("architectures.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=_Architectures)

"""Traits of the known architectures: the table architectures.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import msgspec

from autotune.core.yaml_document import packaged_table


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

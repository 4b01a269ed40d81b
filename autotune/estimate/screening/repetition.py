"""Repetition of a model's layers: how few of them determine a model of any depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.core.errors import BadInput
from autotune.estimate.model_shape import shape, text_config

MAX_PERIOD = 8  # longest pattern of layers: Gemma 3 repeats after six
MAX_HEAD = 4  # most layers before the pattern begins, or further ones where kinds alternate

LISTS_BY_LAYER = ("layer_types", "no_rope_layers")
"""Entries of a configuration with a value for each layer."""


@dataclass(frozen=True, kw_only=True)
class LayerRepetition:
    """The group of layers `first` to `first + period - 1`, inserted again `copies` times."""

    layers: int  # layers of the short model, L0
    first: int
    period: int  # layers of the group, p
    copies: int  # c; the model has L = L0 + c p layers

    def contains(self, layer: int | None) -> bool:
        """Return True if the layer of the short model is in the group."""
        return layer is not None and self.first <= layer < self.first + self.period


def repetition_of(config: Mapping[str, object]) -> LayerRepetition | None:
    """Return the shortest model that determines this one; None without a pattern of layers."""
    kinds = _layer_kinds(config)
    for period in range(1, MAX_PERIOD + 1):
        # The lowest layer of a kind is the last one that uses what the kind shares, its attention
        # mask or rotary table, and frees it in the backward pass: it is not in the group.
        least = 1 if period == 1 else period
        for head in range(least, least + MAX_HEAD):
            if not _repeats(kinds, head, period):
                continue
            # The short model: the head, the group, one layer after it, and what remains when the
            # others are divided into groups.
            layers = head + period + 1
            layers += (len(kinds) - layers) % period
            if layers + period <= len(kinds):
                copies = (len(kinds) - layers) // period
                return LayerRepetition(
                    layers=layers,
                    first=head,
                    period=period,
                    copies=copies,
                )
    return None


def _layer_kinds(config: Mapping[str, object]) -> list[object]:
    """Return an entry for each layer; equal entries are equal layers."""
    text = text_config(config)
    stated = _lists_by_layer(text)
    try:
        layers: Sequence[object] = shape(config).layers
    except BadInput:  # unknown architecture: the traces will show whether its layers are alike
        count = text.get("num_hidden_layers")
        if stated or not isinstance(count, int):
            return list(zip(*stated, strict=True))
        return [None] * count
    return list(zip(layers, *stated, strict=True))


def _lists_by_layer(text: Mapping[str, object]) -> list[Sequence[object]]:
    """Return the lists of the configuration with the kind of each layer."""
    lists = []
    count = text.get("num_hidden_layers")
    for name in LISTS_BY_LAYER:
        values = text.get(name)
        if not isinstance(values, Sequence) or isinstance(values, str):
            continue
        if values and count in (None, len(values)):
            lists.append(values)
    return lists


def _repeats(
    kinds: Sequence[object],
    head: int,
    period: int,
) -> bool:
    """Return True if each layer after the head equals the one a period later."""
    places = range(head, len(kinds) - period)
    return all(kinds[place] == kinds[place + period] for place in places)

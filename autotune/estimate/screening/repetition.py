"""Repetition of a model's layers: how few of them determine a model of any depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.core.errors import BadInput
from autotune.estimate.model_shape import shape, text_config

MAX_PERIOD = 8  # longest pattern of layers: Gemma 3 repeats after six
MAX_HEAD = 4  # most layers before the pattern begins


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
        for head in range(1, MAX_HEAD + 1):
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
    types = text.get("layer_types")
    if not isinstance(types, Sequence) or isinstance(types, str):
        types = ()
    try:
        layers = shape(config).layers
    except BadInput:  # unknown architecture: the traces will show whether its layers are alike
        count = text.get("num_hidden_layers")
        if types or not isinstance(count, int):
            return list(types)
        return [None] * count
    if types:
        return list(zip(layers, types, strict=True))
    return list(layers)


def _repeats(
    kinds: Sequence[object],
    head: int,
    period: int,
) -> bool:
    """Return True if each layer after the head equals the one a period later."""
    places = range(head, len(kinds) - period)
    return all(kinds[place] == kinds[place + period] for place in places)

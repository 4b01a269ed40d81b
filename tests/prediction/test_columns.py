"""Columns of numbers: what is read equals what was written, and a layer is written once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autotune.prediction.columns import WINDOW, column_of, numbers_of

NUMBERS = st.integers(-(2**62), 2**62 - 1)
LAYER = st.lists(st.integers(-300, 300), min_size=1, max_size=3 * WINDOW)


def read_again(values: list[int]) -> list[int]:
    numbers: list[int] = numbers_of(column_of(values)).tolist()
    return numbers


@given(st.lists(NUMBERS, max_size=50))
def test_any_numbers_are_kept(values: list[int]) -> None:
    assert read_again(values) == values


@given(head=LAYER, layer=LAYER, copies=st.integers(1, 40), tail=LAYER)
def test_layers_are_kept(
    head: list[int],
    layer: list[int],
    copies: int,
    tail: list[int],
) -> None:
    values = [*head, *(layer * copies), *tail, *layer]
    assert read_again(values) == values


def test_a_further_layer_takes_no_bytes() -> None:
    """Allocation numbers of 40 and of 80 equal layers; their differences repeat."""
    layer = np.random.default_rng(5).integers(1, 100, size=200)
    shorter, longer = (np.cumsum(np.tile(layer, layers)) for layers in (40, 80))
    assert len(column_of(longer)) == len(column_of(shorter)) < 2 * len(layer)

"""Repetition of layers: which of them a short model needs, worked out by hand."""

from __future__ import annotations

import pytest

from autotune.estimate.screening import Point, repetition_of
from autotune.estimate.screening.repetition import LayerRepetition
from autotune.prediction.step_families import crosses_window


def test_layers_without_positions_are_a_pattern() -> None:
    """Every fourth of 36 layers has none: four, the group of four, one more, and the three that
    remain of 27.
    """
    config = {
        "model_type": "unknown",
        "num_hidden_layers": 36,
        "no_rope_layers": [1, 1, 1, 0] * 9,
    }
    assert repetition_of(config) == LayerRepetition(layers=12, first=4, period=4, copies=6)


def test_a_list_that_is_not_as_long_as_the_model_says_nothing() -> None:
    config = {"model_type": "unknown", "num_hidden_layers": 6, "no_rope_layers": [1, 0]}
    assert repetition_of(config) == LayerRepetition(layers=3, first=1, period=1, copies=3)


def test_the_lowest_layer_of_each_kind_is_outside_of_the_group() -> None:
    """It frees in the backward pass what layers of its kind share. Two kinds alternate."""
    config = {
        "model_type": "unknown",
        "num_hidden_layers": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 6,
    }
    assert repetition_of(config) == LayerRepetition(layers=6, first=2, period=2, copies=3)


@pytest.mark.parametrize(
    ("window", "crosses"),
    [
        (50, False),  # shorter than each prompt: every cache of such a layer is full
        (72, True),
        (512, True),
        (4000, True),  # within the lengths of rows, above every prompt
        (9000, False),
        (None, False),
    ],
)
def test_a_window_within_the_lengths_is_crossed(window: int | None, crosses: bool) -> None:
    points = [Point(1, 72, 136, 4), Point(8, 2056, 2056, 64)]
    config = {"model_type": "mistral", "sliding_window": window}
    assert crosses_window({"model": {"config": config}}, points) == crosses


def test_a_window_that_is_not_used_is_not_crossed() -> None:
    points = [Point(1, 72, 136, 4), Point(8, 2056, 2056, 64)]
    config = {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False}
    assert not crosses_window({"model": {"config": config}}, points)

"""Repetition of layers: which of them a short model needs, worked out by hand."""

from __future__ import annotations

import pytest

from autotune.estimate.screening import repetition_of
from autotune.estimate.screening.repetition import LayerRepetition
from autotune.prediction.step_families import window_side


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
    ("window", "side"),
    [
        (50, (False, False)),  # shorter than the prompt: every cache of such a layer is full
        (72, (True, False)),
        (207, (True, False)),
        (208, (True, True)),
        (None, (True, True)),
    ],
)
def test_lengths_are_on_one_side_of_a_window(
    window: int | None,
    side: tuple[bool, bool],
) -> None:
    request = request_of({"model_type": "mistral", "sliding_window": window})
    assert window_side(request) == side


def test_a_window_that_is_not_used_has_no_sides() -> None:
    config = {"model_type": "qwen2", "sliding_window": 50, "use_sliding_window": False}
    assert window_side(request_of(config)) == (True, True)


def request_of(config: dict[str, object]) -> dict[str, object]:
    """Return a request for rows of 72 and 136 tokens."""
    return {
        "model": {"config": config},
        "settings": {"per_device_train_batch_size": 1},
        "lengths": {"prompt": 72, "completion": 136},
    }

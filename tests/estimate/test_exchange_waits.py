"""Waits for the exchanges of sharded layers: two gathers, and a reduction if they are trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.trace import Trace
from tests.estimate.test_throughput import seconds, trace


def with_layers(layers: int, trained_share: float) -> Trace:
    inventory = trace().inventory
    trained = round(trained_share * inventory.parameters)
    inventory = replace(inventory, layer_bytes=(1,) * layers, trainable_parameters=trained)
    return replace(trace(), inventory=inventory)


def seconds_of_72_layers(trained_share: float) -> float:
    """Return what 72 further layers add to the backward pass; transfers stay equal."""
    values = []
    for layers in (8, 80):
        phases = seconds(
            with_layers(layers, trained_share),
            ranks=2,
            generation_batch=32,
            sharded_by="fsdp2",
        )
        values.append(phases["backward"].value)
    return values[1] - values[0]


@pytest.mark.parametrize(
    ("trained_share", "exchanges"), [(1.0, 3), (0.51, 3), (0.49, 2), (0.01, 2)]
)
def test_weights_that_are_not_trained_are_not_reduced(trained_share: float, exchanges: int) -> None:
    of_one_exchange = seconds_of_72_layers(1.0) / 3
    assert of_one_exchange > 0
    assert seconds_of_72_layers(trained_share) == pytest.approx(exchanges * of_one_exchange)

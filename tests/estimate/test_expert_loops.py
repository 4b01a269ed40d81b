"""Experts one after the other, on cards without a grouped kernel for their products."""

from __future__ import annotations

import pytest

from autotune.catalog import efficiency, gpus
from autotune.core.measurement import Phase
from autotune.core.prediction import Estimate
from autotune.estimate.model_shape import shape
from autotune.estimate.throughput.expert_loops import with_expert_loops
from tests.estimate.synthetic import config_of
from tests.estimate.test_throughput import composition

GPUS = {gpu.name: gpu for gpu in gpus()}
MIXTURE = "Qwen/Qwen3-30B-A3B"  # 48 layers of 128 experts


def added(
    card: str,
    model: str,
    *,
    checkpointing: bool,
) -> tuple[float, float]:
    """Return what the loops add to a forward and a backward pass of two micro-steps."""
    phases: tuple[Phase, ...] = ("forward", "backward")
    seconds = dict.fromkeys(phases, Estimate.exactly(1.0))
    step = composition(checkpointing=checkpointing)
    with_loops = with_expert_loops(seconds, step, shape(config_of(model)), GPUS[card], 2)
    return with_loops["forward"].value - 1, with_loops["backward"].value - 1


@pytest.mark.parametrize(("checkpointing", "passes"), [(False, 1), (True, 2)])
def test_each_expert_of_each_layer_takes_its_time(checkpointing: bool, passes: int) -> None:
    one_pass = 2 * 48 * 128 * efficiency("expert_loop_milliseconds").value / 1000
    forward, backward = added("B200", MIXTURE, checkpointing=checkpointing)
    assert forward == pytest.approx(one_pass)
    assert backward == pytest.approx(passes * one_pass)


@pytest.mark.parametrize(("card", "model"), [("H100", MIXTURE), ("B200", "Qwen/Qwen3-4B")])
def test_other_cards_and_dense_models_have_none(card: str, model: str) -> None:
    assert added(card, model, checkpointing=True) == (0, 0)

"""Speed of cards with which no prediction was ever compared."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.catalog import gpus
from autotune.core.prediction import Estimate, PhasePrediction, Prediction
from autotune.estimate.model_shape import shape
from autotune.estimate.throughput.uncompared_cards import is_compared, widened
from tests.estimate.synthetic import config_of

GPUS = {gpu.name: gpu for gpu in gpus()}
DENSE = shape(config_of("Qwen/Qwen3-4B"))
MIXTURE = shape(config_of("Qwen/Qwen3-30B-A3B"))


def exactly(value: float) -> Estimate:
    return Estimate.exactly(value)


def interval(value: float, low: float, high: float) -> Estimate:
    return Estimate(value=value, low=low, high=high)


# A cycle of 10 s: 6 s of rollout, 4 s of training, 1,000 tokens.
PREDICTION = Prediction(
    candidate_id="candidate",
    basis="traced",
    fits=True,
    limit_bytes=1,
    peak_memory_bytes=exactly(1),
    torch_peak_allocated_bytes=exactly(1),
    torch_peak_reserved_bytes=exactly(1),
    phases=(
        PhasePrediction(name="rollout", peak_bytes=exactly(1), seconds=exactly(6)),
        PhasePrediction(name="backward", peak_bytes=exactly(1), seconds=exactly(4)),
    ),
    tokens_per_second=exactly(100),
)


def test_a_card_with_rows_keeps_its_prediction() -> None:
    assert widened(PREDICTION, GPUS["A100-40G"], DENSE) == PREDICTION


def test_another_card_is_known_within_a_factor_of_two() -> None:
    prediction = widened(PREDICTION, GPUS["L4"], DENSE)
    assert prediction.tokens_per_second == interval(100, 50, 200)
    assert [phase.seconds for phase in prediction.phases] == [interval(6, 3, 12), interval(4, 2, 8)]


def test_a_mixture_on_a_b200_trains_as_slowly_as_its_public_rows() -> None:
    assert widened(PREDICTION, GPUS["B200"], DENSE) == PREDICTION
    prediction = widened(PREDICTION, GPUS["B200"], MIXTURE)
    rollout, backward = prediction.phases
    assert rollout.seconds == exactly(6)
    assert backward.seconds == interval(16, 4, 32)
    # 1,000 tokens in 6 + 16, 6 + 32 and 6 + 4 seconds
    assert prediction.tokens_per_second is not None
    assert prediction.tokens_per_second.value == pytest.approx(1000 / 22)
    assert prediction.tokens_per_second.low == pytest.approx(1000 / 38)
    assert prediction.tokens_per_second.high == pytest.approx(1000 / 10)


def test_no_speed_stays_none() -> None:
    without_speed = dataclasses.replace(PREDICTION, phases=(), tokens_per_second=None)
    assert widened(without_speed, GPUS["L4"], DENSE) == without_speed


def test_the_cards_with_rows_are_those_with_public_pages() -> None:
    compared = {name for name, gpu in GPUS.items() if is_compared(gpu)}
    assert compared == {
        "A100-40G",
        "A100-80G",
        "A800-40G",
        "A800-80G",
        "A6000",
        "B200",
        "H100",
        "H200",
        "H800",
    }
    for name in compared:
        page = GPUS[name].speed_rows
        assert page is not None
        assert page.startswith("https://github.com/")

"""Price lists: what is wrong is named with its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.errors import BadInput
from autotune.core.prediction import Estimate
from autotune.machine.hardware_detection import hardware
from autotune.solver.cheapest_hardware import (
    CheapestHardware,
    Offer,
    PredictedOffer,
    hardware_lines,
    read_prices,
)
from tests.estimate.test_uncompared_cards import PREDICTION


def test_offers_are_in_order_of_their_price(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("currency: EUR\n8xH100: 24\nA100-40G: 1.1\n2xH300=280G: 9.5\n")
    offers, currency = read_prices(file)
    assert [(offer.gpus, offer.per_hour) for offer in offers] == [
        ("A100-40G", 1.1),
        ("2xH300=280G", 9.5),
        ("8xH100", 24.0),
    ]
    assert currency == "EUR" and offers[2].hardware.count == 8


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a YAML mapping"),
        ("currency: USD\n", "no hardware"),
        ("A100-40G: free\n", "line 1, column 1: A100-40G: 'free' is no price above zero"),
        ("L4: 0.7\nA100-40G: 0\n", "line 2, column 1: A100-40G: 0 is no price"),
        ("L4: .inf\n", "is no price"),
        ("A101-40G: 1\n", "line 1, column 1: Unknown GPU 'A101-40G'"),
        ("cpu: 1\n", "cpu is no GPU"),
        ("L4: [1, 2]\n", "is no price"),
    ],
)
def test_a_bad_list_is_refused_with_the_line(
    tmp_path: Path,
    text: str,
    says: str,
) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(BadInput, match=says):
        read_prices(file)


def test_the_cost_of_a_step_is_its_seconds_at_the_price() -> None:
    offer = Offer(
        gpus="L4",
        hardware=hardware("L4", here=()),
        per_hour=7.2,
    )
    prediction = PredictedOffer(
        offer=offer,
        step_seconds=Estimate(
            value=10,
            low=5,
            high=20,
        ),
    )
    assert prediction.step_cost == Estimate(
        value=0.02,
        low=0.01,
        high=0.04,
    )
    nothing = CheapestHardware(offers=(prediction,), currency="")
    assert nothing.per_hour is None and nothing.per_step is None


def test_a_card_that_was_ordered_wrongly_is_not_ranked() -> None:
    offers = []
    for gpus, is_misordered in (("B200", True), ("H100", False)):
        offer = Offer(gpus=gpus, hardware=hardware(gpus, here=()), per_hour=3.6)
        predicted = PredictedOffer(
            offer=offer,
            prediction=replace(PREDICTION, fits=True, speed_misordered=is_misordered),
            step_seconds=Estimate.exactly(1.0 if is_misordered else 2.0),
        )
        offers.append(predicted)
    answer = CheapestHardware(offers=tuple(offers), currency="USD")
    assert answer.per_step is offers[1]
    [b200] = [line for line in hardware_lines(answer) if line.startswith("B200")]
    assert "not ranked by its speed" in b200

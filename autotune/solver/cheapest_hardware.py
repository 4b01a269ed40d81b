"""Price list of `solve gpus --price`, and its cheapest hardware that fits, with predicted seconds and cost per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.core.composition import Composition
from autotune.core.errors import BadInput
from autotune.core.job import Hardware
from autotune.core.prediction import Estimate, Prediction
from autotune.core.space import Candidate, KnobValue
from autotune.core.yaml_document import Document, read_document
from autotune.machine import hardware_detection

EXAMPLE = "Write lines like `2xA100-80G: 3.60`, the price of one hour of all its GPUs."
CURRENCY = "currency"
MAX_OFFERS = 50
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Hardware for rent."""

    gpus: str  # as in --gpus
    hardware: Hardware
    per_hour: float  # of all its GPUs


def read_prices(path: Path) -> tuple[list[Offer], str]:
    """Return the offers of the user's YAML file, cheapest first, and their currency as written; empty: not stated.

    BadInput names the line of what is wrong."""
    document = read_document(path)
    offers = [_offer(document, str(name), price) for name, price in document.content.items() if name != CURRENCY]
    if not offers:
        raise document.error((), "the price list has no hardware.", way_out=EXAMPLE)
    if len(offers) > MAX_OFFERS:
        raise document.error((), f"more than {MAX_OFFERS} offers.", way_out="Leave out those that you would not rent.")
    return sorted(offers, key=lambda one: one.per_hour), str(document.content.get(CURRENCY) or "")


def _offer(document: Document, name: str, price: object) -> Offer:
    if not isinstance(price, int | float) or isinstance(price, bool) or not 0 < price < float("inf"):
        raise document.error((name,), f"{name}: {price!r} is no price above zero.", way_out=EXAMPLE)
    try:
        hardware = hardware_detection.hardware(name, here=())
    except BadInput as error:
        raise document.error((name,), error.what, way_out=error.way_out) from error
    if hardware.kind != "cuda":
        raise document.error((name,), f"{name} is no GPU.", way_out=EXAMPLE)
    return Offer(gpus=name, hardware=hardware, per_hour=float(price))


@dataclass(frozen=True, kw_only=True)
class PredictedOffer:
    """Offer with the prediction for it, or the reason that there is none."""

    offer: Offer
    candidate: Candidate | None = None
    prediction: Prediction | None = None
    # Neutral settings that were changed to make it fit there; empty: as requested
    change: Mapping[str, KnobValue] = field(default_factory=dict)
    refusal: str | None = None
    step_seconds: Estimate | None = None  # of an optimizer step at the longest lengths; None: no speed known

    @property
    def fits(self) -> bool | None:
        return False if self.prediction is None else self.prediction.fits

    @property
    def step_cost(self) -> Estimate | None:
        return None if self.step_seconds is None else self.step_seconds.scaled(self.offer.per_hour / SECONDS_PER_HOUR)


@dataclass(frozen=True, kw_only=True)
class CheapestHardware:
    """Answer of `solve gpus`."""

    offers: tuple[PredictedOffer, ...]  # cheapest per hour first
    currency: str

    @property
    def per_hour(self) -> PredictedOffer | None:
        """Offer with the lowest price per hour that surely fits."""
        return next((one for one in self.offers if one.fits), None)

    @property
    def per_step(self) -> PredictedOffer | None:
        """Offer with the lowest predicted cost of a step that surely fits; None: no speed is known."""
        known = [(one.step_cost.value, one) for one in self.offers if one.fits and one.step_cost is not None]
        return min(known, key=lambda pair: pair[0])[1] if known else None


def step_seconds(prediction: Prediction, composition: Composition, iterations: int = 1) -> Estimate | None:
    """Return seconds of one optimizer step: its share of a generation cycle.

    share = completions per optimizer step / (completions per cycle * uses of each completion)
    """
    known = [phase.seconds for phase in prediction.phases if phase.seconds is not None]
    if not known:
        return None
    cycle = sum(known, start=Estimate.exactly(0))
    if composition.generation == "none" or not composition.generation_batch:
        return cycle  # without completions, a cycle is one step
    step = composition.micro_batch * composition.accumulation * composition.ranks
    return cycle.scaled(step / (composition.generation_batch * max(iterations, 1)))

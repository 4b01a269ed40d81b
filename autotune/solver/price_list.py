"""Price list of `solve gpus --price`: hardware, as in --gpus, and its price per hour."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autotune.core.errors import BadInput
from autotune.core.hardware import Hardware
from autotune.core.yaml_document import Document, read_document
from autotune.machine import hardware_detection

EXAMPLE = "Write lines like `2xA100-80G: 3.60`, the price of one hour of all its GPUs."
CURRENCY = "currency"
MAX_OFFERS = 50


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Hardware for rent."""

    gpus: str  # as in --gpus
    hardware: Hardware
    per_hour: float  # of all its GPUs


@dataclass(frozen=True, kw_only=True)
class PriceList:
    """Offers, cheapest first."""

    offers: tuple[Offer, ...]
    currency: str  # as written; empty: not stated


def read_prices(path: Path) -> PriceList:
    """Read the user's YAML file. BadInput names the line of what is wrong."""
    document = read_document(path)
    offers = [_offer(document, str(name), price) for name, price in document.content.items() if name != CURRENCY]
    if not offers:
        raise document.error((), "the price list has no hardware.", way_out=EXAMPLE)
    if len(offers) > MAX_OFFERS:
        raise document.error((), f"more than {MAX_OFFERS} offers.", way_out="Leave out those that you would not rent.")
    currency = document.content.get(CURRENCY, "")
    return PriceList(offers=tuple(sorted(offers, key=lambda one: one.per_hour)), currency=str(currency or ""))


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

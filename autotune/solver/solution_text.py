"""Terminal output of `autotune solve`."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.core.answer import setting_text
from autotune.core.prediction import Prediction
from autotune.core.units import format_bytes, format_seconds
from autotune.search.advice import as_flags
from autotune.solver.cheapest_hardware import CheapestHardware, PredictedOffer
from autotune.solver.largest_value import LargestValue


def value_lines(found: LargestValue) -> Iterator[str]:
    """Yield the answer for a setting."""
    yield "Predicted, nothing was measured."
    if found.surely is not None and found.surely.prediction is not None:
        yield f"{found.setting}={found.surely.value} surely fits: {_margin(found.surely.prediction)}"
    else:
        yield f"No value of {found.setting} surely fits, with the other settings as they are."
    if found.possibly is not None and found.possibly.prediction is not None:
        yield f"{found.setting}={found.possibly.value} may fit: {_margin(found.possibly.prediction)}"
    if found.next is None:
        yield f"{found.tried[-1].value} is the largest value that was considered."
    elif found.next.refusal is not None:
        yield f"{found.setting}={found.next.value} is refused: {found.next.refusal}"
    elif found.next.prediction is not None:
        yield f"{found.setting}={found.next.value} does not fit: {_margin(found.next.prediction)}"
    yield f"As requested: {found.setting}={setting_text(found.given)}. {len(found.tried)} values were tried."


def hardware_lines(found: CheapestHardware) -> Iterator[str]:
    """Yield the answer for a price list, then every offer."""
    yield "Predicted, nothing was measured. A step is an optimizer step at the longest lengths."
    if found.per_hour is None:
        yield "Nothing on the price list surely fits."
    else:
        yield f"cheapest per hour that fits: {found.per_hour.offer.gpus}"
    if found.per_step is not None:
        yield f"cheapest per step that fits: {found.per_step.offer.gpus}"
    for one in found.offers:
        yield f"{one.offer.gpus}, {one.offer.per_hour:g} {found.currency}".rstrip() + f" per hour: {_offer(one, found.currency)}"


def _offer(one: PredictedOffer, currency: str) -> str:
    if one.prediction is None:
        return f"refused. {one.refusal}"
    verdict = {True: "fits", False: "does not fit", None: "can't be decided"}[one.fits]
    words = [f"{verdict}{f' with {as_flags(one.change)}' if one.change else ''}", _margin(one.prediction)]
    if one.step_seconds is not None and one.step_cost is not None:
        value, low, high = (format_seconds(getattr(one.step_seconds, name)) for name in ("value", "low", "high"))
        cost = f"{one.step_cost.value:.3g} {currency}".rstrip() + f" ({one.step_cost.low:.3g} to {one.step_cost.high:.3g})"
        words.append(f"{value} ({low} to {high}) and {cost} per step")
    return ", ".join(words)


def _margin(prediction: Prediction) -> str:
    peak, margin = prediction.peak_memory_bytes, prediction.margin_bytes
    need = f"{format_bytes(peak.value)} ({format_bytes(peak.low)} to {format_bytes(peak.high)}) of "
    need += format_bytes(prediction.limit_bytes)
    return f"{need}, at least {format_bytes(margin.low)} left" if prediction.fits else need

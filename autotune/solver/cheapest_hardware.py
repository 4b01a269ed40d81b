"""Cheapest hardware of a price list (`solve gpus --price`) that fits, with predicted seconds and
cost per step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.core.composition import Composition
from autotune.core.errors import BadInput
from autotune.core.events import JobStarted, Listener, Predicting
from autotune.core.job import Hardware, Job
from autotune.core.prediction import Estimate, Prediction
from autotune.core.space import KnobValue
from autotune.core.units import format_seconds
from autotune.core.yaml_document import Document, read_document
from autotune.machine import hardware_detection
from autotune.prediction.service import PredictionService, open_prediction_service
from autotune.report.document_rows import interval, job_row, prediction_row
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request
from autotune.search.advice import as_flags, ways_to_fit
from autotune.solver.largest_value import SCHEMA, SolverAttempt, margin_text

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


@dataclass(frozen=True, kw_only=True)
class PredictedOffer(SolverAttempt):
    """Offer with the prediction for it, or the reason that there is none."""

    offer: Offer
    # Neutral settings that were changed to make it fit there; empty: as requested
    change: Mapping[str, KnobValue] = field(default_factory=dict)
    step_seconds: Estimate | None = (
        None  # of an optimizer step at the longest lengths; None: no speed known
    )

    @property
    def step_cost(self) -> Estimate | None:
        return (
            None
            if self.step_seconds is None
            else self.step_seconds.scaled(self.offer.per_hour / SECONDS_PER_HOUR)
        )


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
        """Offer with the lowest predicted cost of a step that surely fits; None: no speed is
        known.
        """
        known = [
            (one.step_cost.value, one)
            for one in self.offers
            if one.fits and one.step_cost is not None
        ]
        return min(known, key=lambda pair: pair[0])[1] if known else None


def find_cheapest_hardware(flags: Flags, listener: Listener) -> tuple[Job, CheapestHardware]:
    """Return the job at the first offer, and the answer."""
    if flags.price is None:
        raise BadInput("--price was not given.", way_out=f"Give a YAML file. {EXAMPLE}")
    if flags.gpus != Flags().gpus:
        raise BadInput(
            "--gpus is what is solved for.",
            way_out="Leave it out, and list the hardware in the file of --price.",
        )
    offers, currency = read_prices(Path(flags.price).expanduser())
    found: list[PredictedOffer] = []
    refused: list[BadInput] = []
    opened: tuple[Job, PredictionService] | None = None  # of the first offer
    with contextlib.ExitStack() as open_services:
        for offer in offers:
            listener(Predicting(text=offer.gpus))
            try:
                request = parse_request(flags.replace(gpus=offer.gpus), limit_prompts=True)
                if opened is None:
                    opened = request.job, open_prediction_service(request.job, request.trainer)
                    open_services.callback(opened[1].close)
                    # Notes that do not concern one offer's hardware.
                    here = str(request.job.task.hardware)
                    notes = tuple(
                        one
                        for one in request.notes
                        if here not in one and not one.startswith("several GPUs")
                    )
                    listener(
                        JobStarted(
                            job=request.job, candidates=(), assumed=request.assumed, notes=notes
                        )
                    )
                found.append(_predicted(offer, request, opened[1].of(request.job)))
            except BadInput as error:
                refused.append(error)
                found.append(PredictedOffer(offer=offer, refusal=error.what))
    if opened is None or len(refused) == len(found):
        raise refused[0]
    return opened[0], CheapestHardware(offers=tuple(found), currency=currency)


def _predicted(offer: Offer, request: ParsedRequest, service: PredictionService) -> PredictedOffer:
    """Predict the configuration there; where it does not fit, the best neutral change that makes
    it fit.
    """
    candidate = candidate_of_job(request)
    prediction = service.predict(candidate)
    found = PredictedOffer(offer=offer, candidate=candidate, prediction=prediction)
    if prediction.fits is not True:
        ways = ways_to_fit(request, candidate, service, prediction=prediction)
        way = next((way for way in ways if not way.learning), None)
        if way is not None:
            knobs = request.whole_space.with_remedies({**candidate.knobs, **way.change})
            changed = request.trainer.complete(knobs, request.job.task)
            found = replace(found, candidate=changed, prediction=way.prediction, change=way.change)
    assert found.candidate is not None and found.prediction is not None
    iterations = found.candidate.settings.get("num_iterations")
    composition = request.trainer.compose(found.candidate, request.job.task)
    seconds = step_seconds(
        found.prediction, composition, iterations if isinstance(iterations, int) else 1
    )
    return replace(found, step_seconds=seconds)


def step_seconds(
    prediction: Prediction, composition: Composition, iterations: int = 1
) -> Estimate | None:
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


def read_prices(path: Path) -> tuple[list[Offer], str]:
    """Return the offers of the user's YAML file, cheapest first, and their currency as written;
    empty: not stated.

    BadInput names the line of what is wrong.
    """
    document = read_document(path)
    offers = [
        _offer(document, str(name), price)
        for name, price in document.content.items()
        if name != CURRENCY
    ]
    if not offers:
        raise document.error((), "the price list has no hardware.", way_out=EXAMPLE)
    if len(offers) > MAX_OFFERS:
        raise document.error(
            (),
            f"more than {MAX_OFFERS} offers.",
            way_out="Leave out those that you would not rent.",
        )
    return sorted(offers, key=lambda one: one.per_hour), str(document.content.get(CURRENCY) or "")


def _offer(document: Document, name: str, price: object) -> Offer:
    if (
        not isinstance(price, int | float)
        or isinstance(price, bool)
        or not 0 < price < float("inf")
    ):
        raise document.error((name,), f"{name}: {price!r} is no price above zero.", way_out=EXAMPLE)
    try:
        hardware = hardware_detection.hardware(name, here=())
    except BadInput as error:
        raise document.error((name,), error.what, way_out=error.way_out) from error
    if hardware.kind != "cuda":
        raise document.error((name,), f"{name} is no GPU.", way_out=EXAMPLE)
    return Offer(gpus=name, hardware=hardware, per_hour=float(price))


# Output.


def hardware_document(job: Job, found: CheapestHardware) -> dict[str, Any]:
    """Return the document of a price list. `question` names the first offer's hardware."""
    undecided = any(one.fits is None for one in found.offers)
    return {
        "schema": SCHEMA,
        "status": "ok" if found.per_hour else "undecided" if undecided else "nothing_fits",
        "basis": "predicted",
        "setting": "gpus",
        "cheapest_per_hour": found.per_hour and found.per_hour.offer.gpus,
        "cheapest_per_step": found.per_step and found.per_step.offer.gpus,
        "currency": found.currency or None,
        "offers": [_offer_row(one) for one in found.offers],
        "question": job_row(job),
    }


def _offer_row(one: PredictedOffer) -> dict[str, Any]:
    return {
        "gpus": one.offer.gpus,
        "price_per_hour": one.offer.per_hour,
        "fits": one.fits,
        "change": dict(one.change),
        "seconds_per_step": interval(one.step_seconds, 3),
        "cost_per_step": interval(one.step_cost, 6),
        "refused_because": one.refusal,
        "prediction": one.prediction and prediction_row(one.prediction),
    }


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
        price = f"{one.offer.gpus}, {one.offer.per_hour:g} {found.currency}".rstrip()
        yield f"{price} per hour: {_offer_text(one, found.currency)}"


def _offer_text(one: PredictedOffer, currency: str) -> str:
    if one.prediction is None:
        return f"refused. {one.refusal}"
    verdict = {True: "fits", False: "does not fit", None: "can't be decided"}[one.fits]
    words = [
        f"{verdict}{f' with {as_flags(one.change)}' if one.change else ''}",
        margin_text(one.prediction),
    ]
    if one.step_seconds is not None and one.step_cost is not None:
        value, low, high = (
            format_seconds(getattr(one.step_seconds, name)) for name in ("value", "low", "high")
        )
        cost = (
            f"{one.step_cost.value:.3g} {currency}".rstrip()
            + f" ({one.step_cost.low:.3g} to {one.step_cost.high:.3g})"
        )
        words.append(f"{value} ({low} to {high}) and {cost} per step")
    return ", ".join(words)

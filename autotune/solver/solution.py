"""`autotune solve`: request -> largest value of a setting, or cheapest hardware."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.core.errors import BadInput, IllegalConfiguration, UnknownName
from autotune.core.events import JobStarted, Listener, Predicting, ignore_events
from autotune.core.job import Job
from autotune.core.space import Candidate
from autotune.prediction.service import PredictionService, open_prediction_service
from autotune.report.answer_document import job_row
from autotune.report.candidate_rows import interval, prediction_row
from autotune.request.assignments import FLAG_OF_SETTING, parse_holds
from autotune.request.flags import Flags, SolveOptions, flags_of
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.prompt_limit import with_longest_prompt
from autotune.request.request_parser import parse_request
from autotune.search.advice import Adviser
from autotune.solver.cheapest_hardware import EXAMPLE, CheapestHardware, Offer, PredictedOffer, read_prices, step_seconds
from autotune.solver.largest_value import LargestValue, LargestValueSearch, Number, Tried, values_from

GPUS = "gpus"  # name of the unknown that is no setting
LENGTHS = ("max_completion_length", "max_prompt_length")  # autotune's names of the lengths whose sum the model's context bounds


@dataclass(frozen=True, kw_only=True)
class SolveAnswer:
    """Answer of `solve`."""

    job: Job  # the request itself
    largest: LargestValue | None = None  # None: hardware was solved for
    cheapest: CheapestHardware | None = None  # None: a setting was solved for
    document: dict[str, Any]  # content of `solve --json`


def solve(setting: str, *, listener: Listener = ignore_events, **options: Any) -> SolveAnswer:
    """Return the largest value of a setting that fits by prediction; with `setting="gpus"` and
    `price="prices.yaml"` the cheapest hardware of that list."""
    return solve_flags(setting, flags_of(options, {*SolveOptions.__annotations__, "arguments"}), listener=listener)


def solve_flags(setting: str, flags: Flags, *, listener: Listener = ignore_events) -> SolveAnswer:
    """Solve for parsed flags."""
    flags = flags.replace(mode="predict")
    if setting == GPUS:
        return _cheapest(flags, listener)
    if flags.price is not None:
        raise BadInput("--price belongs to `autotune solve gpus`.", way_out="Leave it out, or solve for gpus.")
    return _largest(setting, flags, listener)


# The largest value of a setting.


def _largest(setting: str, flags: Flags, listener: Listener) -> SolveAnswer:
    request = with_longest_prompt(parse_request(flags))
    base = candidate_of_job(request)
    name, flag = _framework_name(setting, request)
    given = _number(name, setting, base, request)
    listener(JobStarted(job=request.job, candidates=(base,), assumed=request.assumed, notes=request.notes))
    with contextlib.closing(open_prediction_service(request.job, request.trainer)) as service:

        def legal(value: Number) -> bool:
            return _with_value(flags, name, flag, value)[1] is None

        def predict(value: Number) -> Tried:
            at, refusal = _with_value(flags, name, flag, value)
            if at is None:
                return Tried(value=value, refusal=refusal)
            listener(Predicting(text=f"{name}={value}"))
            candidate = candidate_of_job(at)
            return Tried(value=value, job=at.job, candidate=candidate, prediction=service.of(at.job).predict(candidate))

        values = values_from(given, _context_bound(name, base, request))
        found = LargestValueSearch(setting=name, values=values, is_legal=legal, predict=predict).run(given)
    return SolveAnswer(job=request.job, largest=found, document=value_document(request.job, found))


def _number(name: str, setting: str, base: Candidate, request: ParsedRequest) -> Number:
    """Return the request's own value; BadInput if the setting is unknown or no number."""
    known = {**{field: one.default for field, one in request.trainer.fields().items()}, **base.settings}
    if name not in known:
        raise UnknownName("setting", setting, [*base.settings, *request.trainer.canonical, GPUS])
    value = known[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        fix = "Give it a first value with --set." if value is None else "Solve for a number, like max_completion_length."
        raise BadInput(f"{name} is {value!r:.60}, not a number above zero.", way_out=fix)
    if isinstance(value, float) and value >= 1:
        raise BadInput(f"{name} is {value}, neither a whole number nor a share.", way_out="Solve for a whole number.")
    return value


def _framework_name(setting: str, request: ParsedRequest) -> tuple[str, str | None]:
    """Return the framework's name of a setting, and autotune's flag for it where there is one."""
    canonical = request.trainer.canonical
    by_flag = {flag: own for own, flag in FLAG_OF_SETTING.items()}
    own = by_flag.get(setting, setting)
    own = next((one for one, name in canonical.items() if name == own), own)
    return canonical.get(own, own), FLAG_OF_SETTING.get(own) if own in canonical else None


def _with_value(flags: Flags, name: str, flag: str | None, value: Number) -> tuple[ParsedRequest | None, str | None]:
    """Return the request with this value, or the rule that refuses it."""
    set_, hold = ([text for text in texts if name not in parse_holds([text])] for texts in (flags.set, flags.hold))
    given = {flag: value} if flag else {}
    try:
        at = flags.replace(hold=tuple(hold), set=(*set_, *([] if flag else [f"{name}={value}"])), **given)
        request = with_longest_prompt(parse_request(at))
        candidate_of_job(request)
    except IllegalConfiguration as error:
        return None, error.what
    return request, None


def _context_bound(name: str, base: Candidate, request: ParsedRequest) -> int | None:
    """Return the largest length that the model's context holds; None: no length, or an unknown context."""
    config = request.job.task.workload.model.config
    inner = config.get("text_config")
    context = (inner if isinstance(inner, dict) else config).get("max_position_embeddings")
    own = [request.trainer.canonical.get(length) for length in LENGTHS]
    if name not in own or not isinstance(context, int):
        return None
    other = base.settings.get(next((one for one in own if one is not None and one != name), ""))
    return max(1, context - (other if isinstance(other, int) else 0))


# The cheapest hardware.


def _cheapest(flags: Flags, listener: Listener) -> SolveAnswer:
    if flags.price is None:
        raise BadInput("--price was not given.", way_out=f"Give a YAML file. {EXAMPLE}")
    if flags.gpus != Flags().gpus:
        raise BadInput("--gpus is what is solved for.", way_out="Leave it out, and list the hardware in the file of --price.")
    offers, currency = read_prices(Path(flags.price).expanduser())
    found: list[PredictedOffer] = []
    refused: list[BadInput] = []
    first: ParsedRequest | None = None
    service: PredictionService | None = None
    with contextlib.ExitStack() as open_services:
        for offer in offers:
            listener(Predicting(text=offer.gpus))
            try:
                request = with_longest_prompt(parse_request(flags.replace(gpus=offer.gpus)))
                if first is None or service is None:
                    first, service = request, open_prediction_service(request.job, request.trainer)
                    open_services.callback(service.close)
                    # Notes that do not concern one offer's hardware.
                    here = str(request.job.task.hardware)
                    notes = tuple(one for one in request.notes if here not in one and not one.startswith("several GPUs"))
                    listener(JobStarted(job=request.job, candidates=(), assumed=request.assumed, notes=notes))
                found.append(_predicted(offer, request, service.of(request.job)))
            except BadInput as error:
                refused.append(error)
                found.append(PredictedOffer(offer=offer, refusal=error.what))
    if first is None or len(refused) == len(found):
        raise refused[0]
    answer = CheapestHardware(offers=tuple(found), currency=currency)
    return SolveAnswer(job=first.job, cheapest=answer, document=hardware_document(first.job, answer))


def _predicted(offer: Offer, request: ParsedRequest, service: PredictionService) -> PredictedOffer:
    """Predict the configuration there; where it does not fit, the best neutral change that makes it fit."""
    candidate = candidate_of_job(request)
    prediction = service.predict(candidate)
    found = PredictedOffer(offer=offer, candidate=candidate, prediction=prediction)
    if prediction.fits is not True:
        adviser = Adviser(job=request.job, space=request.whole_space, trainer=request.trainer, service=service)
        way = next((way for way in adviser.ways_to_fit(candidate, prediction) if not way.learning), None)
        if way is not None:
            knobs = request.whole_space.with_remedies({**candidate.knobs, **way.change})
            changed = request.trainer.complete(knobs, request.job.task)
            found = replace(found, candidate=changed, prediction=way.prediction, change=way.change)
    assert found.candidate is not None and found.prediction is not None
    iterations = found.candidate.settings.get("num_iterations")
    composition = request.trainer.compose(found.candidate, request.job.task)
    seconds = step_seconds(found.prediction, composition, iterations if isinstance(iterations, int) else 1)
    return replace(found, step_seconds=seconds)


SCHEMA = 1


def value_document(job: Job, found: LargestValue) -> dict[str, Any]:
    """Return the document of a setting."""
    status = "ok" if found.surely else "undecided" if found.possibly else "nothing_fits"
    best = found.surely or found.possibly
    return {
        "schema": SCHEMA,
        "status": status,
        "basis": "predicted",
        "setting": found.setting,
        "given": found.given,
        "surely_fits": found.surely and found.surely.value,
        "may_fit": found.possibly and found.possibly.value,
        "next": found.next and _tried(found.next),
        "prediction": best and best.prediction and prediction_row(best.prediction),
        "settings": dict(best.candidate.settings) if best and best.candidate else None,
        "tried": [_tried(one) for one in found.tried],
        "question": job_row(job),
    }


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
        "offers": [_offer(one) for one in found.offers],
        "question": job_row(job),
    }


def _tried(one: Tried) -> dict[str, Any]:
    prediction = one.prediction
    return {
        "value": one.value,
        "fits": one.fits,
        "peak_memory_bytes": prediction and interval(prediction.peak_memory_bytes),
        "margin_bytes": prediction and interval(prediction.margin_bytes),
        "refused_because": one.refusal,
    }


def _offer(one: PredictedOffer) -> dict[str, Any]:
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

"""Prediction of one configuration, and its emulation."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from autotune.api.answers import PredictAnswer
from autotune.api.job_start import job_started, with_share_notes
from autotune.core.errors import BadInput, IllegalConfiguration
from autotune.core.events import CandidatePredicted, Listener, Note, ShippedPredicted, ignore_events
from autotune.core.space import Candidate, KnobValue
from autotune.request.command_flags import PredictOptions
from autotune.request.flags import Flags, flags_of

if TYPE_CHECKING:
    from autotune.core.answer import WayToFit
    from autotune.core.measurement import Measurement
    from autotune.core.prediction import Prediction
    from autotune.estimate.unknown_facts import FactVariant
    from autotune.prediction.service import PredictionService
    from autotune.request.job_builder import ParsedRequest
    from autotune.request.request_parser import RequestSources


def predict(
    *, listener: Listener = ignore_events, **options: Unpack[PredictOptions]
) -> PredictAnswer:
    """Predict without a GPU whether a configuration fits, with the parts of its memory and ways
    to make it fit.
    """
    return predict_flags(flags_of(options), listener=listener)


def predict_flags(
    flags: Flags,
    *,
    quick: bool = False,
    listener: Listener = ignore_events,
) -> PredictAnswer:
    """Predict one configuration for parsed flags. `quick`: with a step model of the package where
    it has one, also for other releases than those of the training environment.
    """
    from autotune.estimate.unknown_facts import agreed, worst
    from autotune.prediction.guarded_runs import (
        finished_text,
        refusal_of,
        refusal_text,
        refuted,
    )
    from autotune.prediction.service import open_prediction_service
    from autotune.request.measured_data import with_row_lengths
    from autotune.request.request_parser import read_sources

    # 1. One prediction for each combination of unknown values.
    possible, notes = _legal_variants(read_sources(flags, mode="predict"))
    first = possible[0].request
    service = open_prediction_service(first.job, first.trainer)
    shipped_service = _service_of_package(possible, service)
    if shipped_service is not None and quick:
        service = shipped_service
    elif shipped_service is not None:
        shipped = shipped_service.predict(possible[0].candidate)
        listener(ShippedPredicted(prediction=shipped))
    with contextlib.closing(service):
        variants = _predicted_variants(possible, service)

        # 2. The worst combination represents the request.
        prediction = agreed(variants)
        worst_variant = worst(variants)
        candidate = worst_variant.candidate
        request = possible[variants.index(worst_variant)].request
        request = with_row_lengths(replace(request, notes=(*request.notes, *notes)))
        request = with_share_notes(request, (candidate,))
        listener(job_started(request, (candidate,)))
        refusal = refusal_of(request.job, candidate, prediction.versions)
        refused_because: str | None = None
        if refusal is not None:
            prediction = refuted(prediction, refusal)
            refused_because = refusal_text(refusal)
            listener(Note(text=refused_because))
        else:
            measured = finished_text(request.job, candidate, prediction.versions)
            if measured is not None:
                listener(Note(text=measured))
        listener(CandidatePredicted(candidate=candidate, prediction=prediction))

        # 3. Changes that make it fit.
        ways: tuple[WayToFit, ...] = ()
        if refusal is not None:
            from autotune.search.shown_room import ways_after

            ways = ways_after(
                request,
                candidate,
                service.of(request.job),
                refusal,
            )
        elif not prediction.fits:
            from autotune.search.advice import ways_to_fit

            ways = ways_to_fit(
                request,
                candidate,
                service.of(request.job),
                prediction=worst_variant.prediction,
                listener=listener,
            )
    return PredictAnswer(
        job=request.job,
        candidate=candidate,
        prediction=prediction,
        ways=ways,
        write_document=partial(
            _document,
            request,
            candidate,
            prediction,
            ways,
            unknown=variants if worst_variant.facts else (),
            refusal=refused_because,
        ),
    )


def _document(
    request: ParsedRequest,
    candidate: Candidate,
    prediction: Prediction,
    ways: Sequence[WayToFit],
    *,
    unknown: Sequence[FactVariant],
    refusal: str | None,
) -> Mapping[str, Any]:
    """Return `predict --json`."""
    from autotune.report.answer_document import prediction_document
    from autotune.request.explanation import origins

    return prediction_document(
        request.job,
        candidate,
        prediction,
        ways,
        origins=origins(request, candidate),
        unknown=unknown,
        refusal=refusal,
        assumed=request.assumed_of_file,
    )


def _service_of_package(
    possible: Sequence[_LegalVariant], service: PredictionService
) -> PredictionService | None:
    """Return a service that answers with the package's step models alone, if the environment has
    other releases and can trace their step; None for a request with unknown values.
    """
    from autotune.prediction.service import open_prediction_service

    if len(possible) > 1 or not service.is_shipped_elsewhere(possible[0].candidate):
        return None
    request = possible[0].request
    return open_prediction_service(request.job, request.trainer, traces=False)


def _predicted_variants(
    possible: Sequence[_LegalVariant], service: PredictionService
) -> list[FactVariant]:
    from autotune.estimate.unknown_facts import FactVariant

    variants = []
    for variant in possible:
        prediction = service.of(variant.request.job).predict(variant.candidate)
        variants.append(
            FactVariant(
                facts=variant.facts,
                candidate=variant.candidate,
                prediction=prediction,
            )
        )
    return variants


@dataclass(frozen=True, kw_only=True)
class _LegalVariant:
    """Request with one combination of unknown values, which its framework accepts."""

    facts: Mapping[str, KnobValue]
    request: ParsedRequest
    candidate: Candidate


def _legal_variants(sources: RequestSources) -> tuple[list[_LegalVariant], tuple[str, ...]]:
    """Return the legal combinations of unknown values, with notes on illegal ones, which cannot
    have been run.
    """
    from autotune.request.job_builder import candidate_of_job

    variants: list[_LegalVariant] = []
    notes: list[str] = []
    refusals: list[IllegalConfiguration] = []
    for facts, variant in sources.variants():
        request = variant.parse(limit_prompts=True)
        try:
            candidate = candidate_of_job(request)
        except IllegalConfiguration as refusal:
            refusals.append(refusal)
            stated = " ".join(f"{name}={value}" for name, value in facts.items())
            notes.append(f"{stated} is left out: {refusal.what}")
        else:
            variants.append(
                _LegalVariant(
                    facts=facts,
                    request=request,
                    candidate=candidate,
                )
            )
    if not variants:
        raise refusals[0]
    return variants, tuple(notes)


def emulate_flags(flags: Flags) -> Measurement:
    """Probe one configuration on emulated GPUs, for flags that `check_can_emulate` accepted."""
    from autotune.core.measurement import ProbePlan
    from autotune.probe.executors import open_executor
    from autotune.request.job_builder import candidate_of_job
    from autotune.request.request_parser import read_sources

    request = read_sources(flags, mode="emulate").parse(limit_prompts=True)
    candidate = candidate_of_job(request)
    with contextlib.closing(open_executor(request.job, request.trainer)) as executor:
        return executor.open(candidate).measure(candidate, ProbePlan())


def check_can_emulate(flags: Flags) -> None:
    """Raise the error that prevents `emulate_flags`, before anything is traced."""
    from autotune.emulator.build import build, look
    from autotune.emulator.cards import emulated_machine
    from autotune.machine.environment import interpreter
    from autotune.request.request_parser import read_sources

    values = read_sources(flags, mode="predict").values
    if values.settings.unknown:
        raise BadInput(
            "--check emulates one configuration.",
            way_out="Give each --unknown value with --set, or leave out --check.",
        )
    emulated_machine(values.hardware.gpus)
    build(look(interpreter(values.training.python)))

"""Predictions of every candidate of a request's space, for a reader who compares settings."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.core.errors import BadInput
from autotune.core.job import Job
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate
from autotune.prediction.service import open_prediction_service
from autotune.request.flags import Flags
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import possible_candidates, read_sources
from autotune.search.forecast_search import best_predicted
from autotune.search.problem import legal_candidates

MAX_CANDIDATES = 20_000
"""Candidates of a space that is predicted completely: the page of so many has a few megabytes."""


@dataclass(frozen=True, kw_only=True)
class PredictedSpace:
    """Every candidate of a space with its prediction."""

    job: Job
    start: Candidate  # the configuration of the request
    best: Candidate | None  # the fastest that fits at the preferred settings; None: none does
    candidates: Sequence[Candidate]  # `start` among them
    predictions: Mapping[str, Prediction]  # by candidate id


def predict_space(flags: Flags) -> PredictedSpace:
    """Predict every candidate of the space. BadInput: there are too many, or the request has
    unknown values.
    """
    # 1. The candidates; the request's own configuration may lie outside of the space.
    sources = read_sources(flags, mode="predict")
    if sources.values.settings.unknown:
        raise BadInput(
            "--map shows a space in which every setting is known.",
            way_out="Give each --unknown value with --set, or search it with --search.",
        )
    request = sources.parse(limit_prompts=True)
    start = candidate_of_job(request)
    candidates = [*possible_candidates(request, legal_candidates)]
    if start not in candidates:
        candidates.append(start)
    _refuse_too_many(candidates)

    # 2. Their predictions.
    job = request.job
    with contextlib.closing(open_prediction_service(job, request.trainer)) as service:
        predictions = service.screen(candidates)
    return PredictedSpace(
        job=job,
        start=start,
        best=_best(job, candidates, start, predictions),
        candidates=candidates,
        predictions=predictions,
    )


def _refuse_too_many(candidates: Sequence[Candidate]) -> None:
    if len(candidates) > MAX_CANDIDATES:
        raise BadInput(
            f"The space has {len(candidates):,} candidates; --map holds at most"
            f" {MAX_CANDIDATES:,}.",
            way_out="Keep settings constant: --hold K=V, or --search K=V1,V2 with fewer values.",
        )


def _best(
    job: Job,
    candidates: Sequence[Candidate],
    start: Candidate,
    predictions: Mapping[str, Prediction],
) -> Candidate | None:
    best = best_predicted(job, candidates, start, predictions)
    return None if best is None else best.candidate

"""Search problem of a job: its legal candidates with their predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autotune.core.answer import Trial
from autotune.core.errors import BadInput
from autotune.core.job import Job
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate
from autotune.frameworks.base import Trainer
from autotune.search.surrogate.candidate_table import CandidateTable
from autotune.search.surrogate.estimates import SearchOptions, SurrogateModel
from autotune.search.trial_view import SearchProblem, tiers_of


def legal_candidates(job: Job, trainer: Trainer) -> tuple[Candidate, ...]:
    """Return every distinct candidate of the space that the framework accepts."""
    legal: dict[str, Candidate] = {}
    refusals: Counter[str] = Counter()
    for knobs in job.space.assignments():
        candidate = trainer.complete(knobs, job.task)
        reason = trainer.why_illegal(candidate, job.task)
        if reason is None:
            legal.setdefault(candidate.id, candidate)
        else:
            refusals[reason] += 1
    if not legal:
        raise _nothing_legal(job.space.name, refusals)
    return tuple(legal.values())


def _nothing_legal(space: str, refusals: Counter[str]) -> BadInput:
    message = f"The space {space!r} holds no legal candidate"
    if len(refusals) == 1 and refusals.total() > 1:
        # The text of the rule that rejects every candidate is the way out.
        return BadInput(f"{message}:", way_out=next(iter(refusals)))
    common = "it has no assignment at all"
    if refusals:
        common, _ = refusals.most_common(1)[0]
    return BadInput(
        f"{message}; most often because {common}",
        way_out="Widen it with --search KNOB=V1,V2, or hold fewer values.",
    )


def baseline_candidate(job: Job, trainer: Trainer) -> Candidate | None:
    """Return the user's own configuration, or the framework's defaults; None if the framework
    rejects it.
    """
    knobs = trainer.baseline(job.space, job.task)
    candidate = trainer.complete(knobs, job.task)
    reason = trainer.why_illegal(candidate, job.task)
    return candidate if reason is None else None


def search_problem(
    job: Job,
    candidates: Sequence[Candidate],
    baseline: Candidate | None,
    predictions: Mapping[str, Prediction] = MappingProxyType({}),
    *,
    options: SearchOptions = SearchOptions(),  # noqa: B008
    earlier: Sequence[Trial] = (),
) -> SearchProblem:
    """Return the search problem. `predictions` by candidate id are the surrogate's priors.
    `earlier` are trials of other studies on the same model, versions and hardware: evidence for the
    surrogate, not counted as measured here.
    """
    members = [*candidates, baseline] if baseline else candidates
    table = CandidateTable(job.space, members)
    surrogate = SurrogateModel(
        table,
        predictions,
        limit_bytes=job.memory_limit_bytes,
        headroom_bytes=job.headroom.least_bytes,
        options=options,
    )
    return SearchProblem(
        tiers=tiers_of(job.space, candidates),
        surrogate=surrogate,
        baseline=baseline,
        uses_surrogate=job.sampler == "value",
        predicted_rates=_rates_of(job, predictions),
        earlier=tuple(earlier),
        predictions=predictions,
        headroom=job.headroom,
    )


def _rates_of(job: Job, predictions: Mapping[str, Prediction]) -> dict[str, float]:
    """Return the predicted speeds by candidate id; none where speed is measured."""
    rates: dict[str, float] = {}
    if not job.task.hardware.emulated:
        return rates
    for candidate_id, prediction in predictions.items():
        if prediction.ranking_rate is not None:
            rates[candidate_id] = prediction.ranking_rate.value
    return rates

"""Events of a running request, for displays and callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from autotune.core.answer import PredictedCandidate, Purpose, Recommendation, Trial
    from autotune.core.job import Job
    from autotune.core.prediction import Prediction
    from autotune.core.space import Candidate


@dataclass(frozen=True, kw_only=True)
class JobStarted:
    """Request parsed: the job with its assumptions."""

    job: Job
    candidates: tuple[Candidate, ...]  # all legal candidates; for `predict` the one in question
    assumed: tuple[str, ...]
    assumed_of_file: tuple[str, ...] = ()  # those among them that the reading of a file rests on
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BestPredicted:
    """Best candidate by prediction, before the first probe."""

    best: PredictedCandidate


@dataclass(frozen=True, kw_only=True)
class CandidatesPruned:
    """Screening finished; the search begins."""

    candidates: int
    budget_seconds: float
    max_probes: int
    resumed_trials: int


@dataclass(frozen=True, kw_only=True)
class ProbeStarted:
    number: int
    purpose: Purpose
    candidate: Candidate
    loads: bool  # loads a model or engine first
    seconds_left: float


@dataclass(frozen=True, kw_only=True)
class ProbeEnded:
    trial: Trial
    best: Trial | None
    seconds_left: float


@dataclass(frozen=True, kw_only=True)
class BestChanged:
    """First candidate that fits, or a better one; the search continues."""

    job: Job
    answer: Recommendation  # the answer if the search ended now; marked as interrupted


@dataclass(frozen=True, kw_only=True)
class CandidatePredicted:
    """Prediction of the configuration in question; ways to make it fit are computed next."""

    candidate: Candidate
    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class ShippedPredicted:
    """Prediction by a step model of the package, of other releases than the environment's, whose
    own step is traced next.
    """

    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class Predicting:
    """Prediction of one variant of the request begins."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Note:
    """Sentence for the reader."""

    text: str


Event: TypeAlias = (
    JobStarted
    | BestPredicted
    | CandidatesPruned
    | ProbeStarted
    | ProbeEnded
    | BestChanged
    | CandidatePredicted
    | ShippedPredicted
    | Predicting
    | Note
)
Listener: TypeAlias = Callable[[Event], None]


def ignore_events(event: Event) -> None:
    """Discard the event: the default listener."""

"""What a listener hears while a question is being answered. Displays and callbacks consume these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from autotune.candidate import Candidate
from autotune.prediction import Prediction
from autotune.question import Question
from autotune.recommendation import Purpose, Recommendation, Trial


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The question is understood: what will be answered, and what was taken for granted."""

    question: Question
    candidates: tuple[Candidate, ...]
    """All that are legal; for a prediction the one in question."""

    assumed: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The question is settled; the search begins."""

    candidates: int
    budget_seconds: float
    max_probes: int
    resumed_trials: int


@dataclass(frozen=True, kw_only=True)
class ProbeStarted:
    number: int
    purpose: Purpose
    candidate: Candidate
    loads: bool
    """Whether this probe has to load a model or engine first."""

    seconds_left: float


@dataclass(frozen=True, kw_only=True)
class ProbeEnded:
    trial: Trial
    best: Trial | None
    seconds_left: float


@dataclass(frozen=True, kw_only=True)
class BestChanged:
    """There is something to train with, or something better than before; the search goes on."""

    question: Question
    answer: Recommendation
    """What the answer would be if the search ended here: marked as interrupted."""


@dataclass(frozen=True, kw_only=True)
class Foretold:
    """The configuration in question is predicted; what would make it fit is looked for next."""

    candidate: Candidate
    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class Note:
    """One sentence for the reader."""

    text: str


Event: TypeAlias = Begun | Settled | ProbeStarted | ProbeEnded | BestChanged | Foretold | Note
Listener: TypeAlias = Callable[[Event], None]


def unheard(event: Event) -> None:
    """The listener of those who do not listen."""

"""Forecast: the answer where nothing could be measured. Beside a Recommendation, never in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.candidate import Candidate, KnobValue
from autotune.prediction import Prediction
from autotune.recommendation import Change


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """One candidate with what was predicted about it."""

    candidate: Candidate
    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class WayToFit:
    """A change that would make a candidate fit, or fit with more room."""

    change: Mapping[str, KnobValue]
    learning: bool
    """Whether it changes what is learned."""

    prediction: Prediction
    speed_ratio: float | None
    """Predicted speed against the unchanged candidate's; None where either is unknown or they don't learn the same."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The best candidate by prediction alone."""

    winner: Foreseen | None
    """The fastest, among those that surely fit, with the most preferred learning knobs for which there is one."""

    baseline: Foreseen | None
    changes: tuple[Change, ...] = ()
    relaxed: Mapping[str, KnobValue] = field(default_factory=dict)
    """Learning knobs that had to give way from their most preferred value because nothing surely fits there."""

    runner_ups: tuple[Foreseen, ...] = ()
    trade_offs: tuple[Foreseen, ...] = ()
    """The best with other learning knobs. Offered, never taken."""

    undecided: Foreseen | None = None
    """What is preferred to the winner and may fit: worth a probe on the target."""

    nearest_miss: Foreseen | None = None
    """Where nothing fits: what came closest."""

    candidates: int
    predicted: int
    """Of these; fewer where the budget ended it."""

    screened: int
    """Candidates that cannot fit, by the lower bound of their prediction."""

    elapsed_seconds: float

    @property
    def ended_by_budget(self) -> bool:
        """Whether some candidates were left unpredicted."""
        return self.predicted < self.candidates

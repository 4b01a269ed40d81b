"""Answer of a job: the winner and its evidence, measured (`Recommendation`) or predicted
(`Forecast`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from autotune.core.measurement import Measurement, Verdict
from autotune.core.memory_growth import Soak
from autotune.core.prediction import Estimate, Prediction
from autotune.core.run_statistics import Disturbance, RunSpread
from autotune.core.space import Candidate, KnobValue

Purpose = Literal["baseline", "anchor", "search", "refused", "confirm"]
"""Reason for a probe. `refused`: prediction ruled the candidate out, and is checked."""

Proven = Literal[
    "no better candidate possible",
    "nothing fits",
    "stopped improving",
    "budget spent",
    "not proven infeasible",
    "interrupted",
    "stopped by a fault",
    "not all measured",
]
"""Reason for the end of a search, or what it proves. `not all measured`: every probe of a candidate
was ended from outside.
"""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Predicted figures that a report compares with the measured ones."""

    peak_memory_bytes: Estimate
    tokens_per_second: Estimate | None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Candidate with its measurement, as one trial of the study."""

    number: int  # number in the Optuna study
    purpose: Purpose
    candidate: Candidate
    measurement: Measurement
    verdict: Verdict
    expected: Expected | None = None  # uncorrected prediction; None if there was none


@dataclass(frozen=True, kw_only=True)
class PredictedCandidate:
    """Candidate with its prediction."""

    candidate: Candidate
    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class WayToFit:
    """Change that makes a candidate fit, or fit with more room."""

    change: Mapping[str, KnobValue]
    learning: bool  # changes what is learned
    prediction: Prediction
    # Predicted speed / speed of the unchanged candidate; None if either is unknown or they differ
    # in learning
    speed_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class Change:
    """Setting that differs from the baseline, and the reason."""

    name: str
    baseline: KnobValue
    recommended: KnobValue
    effect: Literal["neutral", "learning"]
    why: str


Evidence = TypeVar("Evidence", Trial, PredictedCandidate)


@dataclass(frozen=True, kw_only=True)
class Answer(Generic[Evidence]):
    """Winner and its alternatives, each with its evidence."""

    # Fastest candidate that fits, at the most preferred learning knobs; None if nothing fits
    winner: Evidence | None
    baseline: Evidence | None
    changes: tuple[Change, ...] = ()  # winner against baseline, learning knobs first
    # Learning knobs below their most preferred value, because nothing fits there
    relaxed: Mapping[str, KnobValue] = field(default_factory=dict)
    runner_ups: tuple[Evidence, ...] = ()  # next best that fit, with the winner's learning knobs
    # Best candidates with other learning knobs: offered, never chosen
    trade_offs: tuple[Evidence, ...] = ()
    # Predicted changes that make the baseline fit, cheapest first; empty unless nothing fits
    ways_to_fit: tuple[WayToFit, ...] = ()
    elapsed_seconds: float


@dataclass(frozen=True, kw_only=True)
class Forecast(Answer[PredictedCandidate]):
    """Answer by prediction alone."""

    # Candidate preferred to the winner that may fit: worth a probe on the target
    undecided: PredictedCandidate | None = None
    nearest_miss: PredictedCandidate | None = None  # candidate closest to fitting, if nothing fits
    candidates: int
    predicted: int  # predicted candidates; fewer than `candidates` if the budget ended
    screened: int  # candidates that cannot fit, by the lower bound of their prediction

    @property
    def ended_by_budget(self) -> bool:
        return self.predicted < self.candidates


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of candidates and probes."""

    candidates: int  # legal candidates of the space
    screened: int
    implied: int
    probed: int
    out_of_memory: int
    failed: int
    loads: int
    # Longer probes of finalists, not included above except in `out_of_memory`, `failed` and `loads`
    confirmations: int = 0
    refused_probed: int = 0  # measured candidates that prediction had ruled out
    false_refusals: int = 0  # those among them that fitted


AdvantageKind = Literal["measurably faster", "within the noise", "not confirmed"]


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """Measured speed of one candidate divided by the baseline's; each bound with 95 %
    confidence.
    """

    candidate_id: str  # the winner; where the baseline was kept, the fastest other candidate
    why: AdvantageKind
    ratio: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class AnswerSource:
    """Origin of an answer that was measured earlier."""

    when: str
    where: str  # host name
    versions: Mapping[str, str]
    elapsed_seconds: float  # duration of that search


@dataclass(frozen=True, kw_only=True)
class Recommendation(Answer[Trial]):
    """Answer by measurement."""

    certificate: Trial | None  # longer worst-case probe that confirmed the winner
    # Learning knobs of the winner: speeds are comparable at equal values
    learning: Mapping[str, KnobValue] = field(default_factory=dict)
    # Failed confirmations of candidates that looked better than the winner
    refuted: tuple[Trial, ...] = ()
    counts: Counts
    proven: Proven
    interrupted: bool = False  # ended by the user or the system
    fault: str | None = None  # reason for which the machine ended the search; None: it did not
    # Dataset rows with prompts beyond a relaxed limit; None if it was not relaxed, or unknown
    rows_left_out: int | None = None
    from_record: AnswerSource | None = None  # None: measured now
    probe_seconds: float  # seconds of probes times devices
    trials: tuple[Trial, ...] = ()  # all measurements in order
    # Comparison with the baseline; None if it was not measured at the winner's learning knobs, or
    # is the fastest itself
    advantage: Advantage | None = None
    run_spread: RunSpread | None = None  # spread between runs, part of every speed's interval
    # Interference of concurrent probes; None if they ran one after another
    disturbance: Disturbance | None = None
    soaks: tuple[Soak, ...] = ()  # long runs of the winner, and of finalists that did not hold


def without_result(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Return the last probe of each candidate whose probes were all ended from outside."""
    last_probes: dict[str, Trial] = {}
    decided: set[str] = set()
    for trial in trials:
        if trial.purpose == "confirm":
            continue
        last_probes[trial.candidate.id] = trial
        if not trial.measurement.ended_from_outside:
            decided.add(trial.candidate.id)
    for candidate_id in decided:
        del last_probes[candidate_id]
    return tuple(last_probes.values())

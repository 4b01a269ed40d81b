"""Recommendation: the answer, its evidence, and how sure it is. The report says it in prose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autotune.candidate import Candidate, KnobValue
from autotune.disturbance import Disturbance
from autotune.measurement import Measurement
from autotune.prediction import Estimate
from autotune.soak import Soak
from autotune.verdict import Verdict

Purpose = Literal["baseline", "anchor", "search", "refused", "confirm"]
"""`refused`: a probe of what prediction had ruled out, to see whether it was right."""

Proven = Literal["no better candidate possible", "stopped improving", "budget spent", "not proven infeasible"]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What was predicted of a candidate before anything was measured, as far as a report sets it beside the measurement."""

    peak_memory_bytes: Estimate
    tokens_per_second: Estimate | None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One candidate with what was found out about it. Lives here as the study's word for the reader of a report."""

    number: int
    """Its number in the Optuna study."""

    purpose: Purpose
    candidate: Candidate
    measurement: Measurement
    verdict: Verdict
    expected: Expected | None = None
    """What was predicted of it, uncorrected; None where nothing was."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How the search was spent."""

    candidates: int
    """Legal candidates of the space."""

    screened: int
    implied: int
    probed: int
    out_of_memory: int
    failed: int
    loads: int
    confirmations: int = 0
    """Longer probes of finalists, which count in none of the others but `out_of_memory`, `failed` and `loads`."""

    refused_probed: int = 0
    """Of what prediction had ruled out, so many were measured all the same."""

    false_refusals: int = 0
    """And of these so many fitted."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting that differs from the baseline, and why."""

    name: str
    baseline: KnobValue
    recommended: KnobValue
    effect: Literal["neutral", "learning"]
    why: str


@dataclass(frozen=True, kw_only=True)
class FromRecord:
    """Where an answer comes from that was not measured now."""

    when: str
    where: str
    """The machine's own name."""

    versions: Mapping[str, str]
    elapsed_seconds: float
    """What the search took then."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The winner and its evidence; `winner` is None when nothing fits."""

    winner: Trial | None
    """The best candidate that fits, confirmed."""

    certificate: Trial | None
    """The longer worst-case probe that confirmed the winner."""

    baseline: Trial | None
    learning: Mapping[str, KnobValue] = field(default_factory=dict)
    """The winner's learning knobs: what its speed may be compared under."""

    runner_ups: tuple[Trial, ...] = ()
    """The next best that fit, with the winner's learning knobs."""

    trade_offs: tuple[Trial, ...] = ()
    """What one step further would bring: measured candidates with other learning knobs. Offered, never taken."""

    changes: tuple[Change, ...] = ()
    """Winner against baseline, learning knobs first."""

    relaxed: Mapping[str, KnobValue] = field(default_factory=dict)
    """Learning knobs that had to give way from their most preferred value because nothing fitted."""

    refuted: tuple[Trial, ...] = ()
    """Confirmations that failed before the winner's: candidates that looked best and did not hold."""

    counts: Counts
    proven: Proven
    interrupted: bool = False
    """True where the user or the system ended the search before it was done."""

    rows_left_out: int | None = None
    """Rows of the dataset with prompts beyond a limit that had to give way; None where it did not, or nothing is known."""

    from_record: FromRecord | None = None
    """None for what was measured just now."""

    elapsed_seconds: float
    probe_seconds: float
    """Seconds the devices were held by probes, over all devices."""

    trials: tuple[Trial, ...] = ()
    """Everything measured, in order."""

    disturbance: Disturbance | None = None
    """How much probes beside each other disturbed each other; None where they ran one after another."""

    soaks: tuple[Soak, ...] = ()
    """Long runs of the winner, and of those that were to be it and did not hold; none where none was asked for."""

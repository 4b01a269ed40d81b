"""The answer's document, read back: only what the page shows, each field checked, later additions ignored.

Nearly everything in it may be absent: the document may be older, or nothing was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from autotune.errors import BadInput
from autotune.report.document import SCHEMA


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted figure with its interval."""

    value: float
    low: float
    high: float


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    worst: float | None = None
    typical: float | None = None


class PredictedPhase(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    peak_bytes: Span | None = None
    breakdown: tuple[Mapping[str, Any], ...] = ()


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """What was foreseen of a candidate. Never shown without the word."""

    peak_memory_bytes: Span | None = None
    tokens_per_second: Span | None = None
    phases: tuple[PredictedPhase, ...] = ()


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate: measured, or predicted where `basis` says so."""

    knobs: Mapping[str, Any]
    trial: int | None = None
    purpose: str = ""
    basis: str = "measured"
    outcome: str | None = None
    fits: bool | None = None
    why: str = ""
    tokens_per_second: Rates | float | None = None
    peak_memory_bytes: float | None = None
    phase: str | None = None
    cause: str | None = None
    evidence: str = ""
    excerpt: str = ""
    seconds: Mapping[str, float] = {}
    timed_cycles: int = 0
    phase_peak_bytes: Mapping[str, float] = {}
    phase_seconds: Mapping[str, float] = {}
    prediction: Predicted | None = None

    @property
    def rate(self) -> float | None:
        """Tokens per second at typical lengths where they are known, at the longest otherwise."""
        if isinstance(self.tokens_per_second, Rates):
            return self.tokens_per_second.typical or self.tokens_per_second.worst
        return self.tokens_per_second

    @property
    def out_of_memory(self) -> bool:
        return (self.outcome or "").startswith("oom_")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: str
    says: str = ""


class OfARank(msgspec.Struct, frozen=True, kw_only=True):
    """What its models' own tensors hold, by part."""

    rank: int
    bytes: Mapping[str, float] = {}


class Certified(msgspec.Struct, frozen=True, kw_only=True):
    """Of a certificate, what is reckoned with; the rest of it is shown as it stands."""

    items: tuple[Check, ...] = ()
    models: tuple[OfARank, ...] = ()
    timed_cycles: float | None = None
    phase_seconds: Mapping[str, float] = {}


class Recommended(msgspec.Struct, frozen=True, kw_only=True):
    knobs: Mapping[str, Any]
    changed_learning_knobs: Mapping[str, Any] = {}
    relaxed: Mapping[str, Any] = {}
    tokens_per_second: Rates = Rates()
    spread: Rates = Rates()
    peak_memory_bytes: float | None = None
    phase_peak_bytes: Mapping[str, float] = {}
    certificate: Mapping[str, Any] | None = None
    prediction: Predicted | None = None
    files: tuple[str, ...] = ()


class Change(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    baseline: Any = None
    recommended: Any = None
    effect: str = "neutral"
    why: str = ""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The question."""

    model: str
    method: str
    framework: str
    hardware: str
    memory_limit_bytes: float
    tuning: str = ""
    weights: str = ""
    space: str = ""
    dataset: Data | None = None


class AtLength(msgspec.Struct, frozen=True, kw_only=True):
    """What a limit at a percentile of the rows drops."""

    share: int
    length: int
    rows_longer: int
    truncating_drops_tokens: int
    filtering_drops_tokens: int


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """The user's own rows."""

    rows: int
    looked_at: int
    tokens: int
    percentiles: tuple[AtLength, ...]


class Disturbed(msgspec.Struct, frozen=True, kw_only=True):
    """What probes that ran at the same time did to each other."""

    says: str = ""
    by_phase: Mapping[str, float] = {}


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    schema: int
    status: str
    basis: str
    question: Asked
    recommendation: Recommended | None = None
    baseline: Row | None = None
    changes: tuple[Change, ...] = ()
    runner_ups: tuple[Row, ...] = ()
    trade_offs: tuple[Mapping[str, Any], ...] = ()
    nearest_miss: Row | None = None
    trials: tuple[Row, ...] = ()
    learning: Mapping[str, Any] = {}
    counts: Mapping[str, int] = {}
    disturbance: Disturbed | None = None
    proven: str = ""
    commands: Mapping[str, str] = {}
    confirm_with: str | None = None
    warnings: tuple[str, ...] = ()
    versions: Mapping[str, str] = {}
    elapsed_seconds: float | None = None
    gpu_seconds: float | None = None
    finished: str | None = None

    @property
    def predicted(self) -> bool:
        return self.basis == "predicted"

    @property
    def probes(self) -> tuple[Row, ...]:
        """Every candidate once, as it was searched; confirmations measured the same ones again."""
        return tuple(row for row in self.trials if row.purpose != "confirm")


def read_evidence(document: Mapping[str, Any]) -> Evidence:
    """BadInput where it is not a document of ours."""
    if document.get("schema") != SCHEMA:
        raise BadInput(
            f"The document has schema {document.get('schema')!r}, and this version reads schema {SCHEMA}.",
            way_out="Make it anew with `autotune run`, or use the version of autotune that wrote it.",
        )
    try:
        evidence = msgspec.convert(document, Evidence, strict=False)
        if evidence.recommendation is not None and evidence.recommendation.certificate is not None:
            msgspec.convert(evidence.recommendation.certificate, Certified, strict=False)
        return evidence
    except msgspec.ValidationError as error:
        raise BadInput(
            f"The document is not one of autotune's: {error}.", way_out="Name a folder that `autotune run` wrote."
        ) from None

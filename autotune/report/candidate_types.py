"""Types of a candidate in recommendation.json: prediction, measurement, certificate,
recommendation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class IntervalRow(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted figure with its interval."""

    value: float
    low: float
    high: float


class SpeedsRow(msgspec.Struct, frozen=True, kw_only=True):
    """Figures at the longest and at the typical lengths."""

    worst: float | None = None
    typical: float | None = None


class PartRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    bytes: float


class PhasePredictionRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    peak_bytes: IntervalRow | None = None
    live_bytes: float | None = None
    seconds: IntervalRow | None = None
    breakdown: tuple[PartRow, ...] = ()


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout engine by prediction."""

    kv_cache_bytes: IntervalRow | None = None
    kv_cache_tokens: int | None = None
    concurrency: float | None = None
    longest_length: int | None = None


class PredictionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction of a candidate. Always displayed with the word "predicted"."""

    basis: str | None = None
    fits: bool | None = None
    depends_on: tuple[str, ...] = ()
    failure: str | None = None
    peak_memory_bytes: IntervalRow | None = None
    peak_memory_bytes_at_lengths: IntervalRow | None = None
    fits_at_lengths: bool | None = None
    limit_bytes: float | None = None
    usable_bytes: IntervalRow | None = None
    margin_bytes: IntervalRow | None = None
    torch_peak_allocated_bytes: IntervalRow | None = None
    torch_peak_reserved_bytes: IntervalRow | None = None
    host_memory_bytes: IntervalRow | None = None
    phases: tuple[PhasePredictionRow, ...] = ()
    breakdown: tuple[PartRow, ...] = ()
    engine: EngineRow | None = None
    tokens_per_second: IntervalRow | None = None
    tokens_per_second_at_lengths: IntervalRow | None = None
    effective: Mapping[str, Any] = {}
    assumptions: tuple[str, ...] = ()
    versions: Mapping[str, str] = {}


class CandidateRow(msgspec.Struct, frozen=True, kw_only=True):
    """Candidate: measured, predicted, or emulated: its memory on emulated GPUs, its speed
    predicted.
    """

    knobs: Mapping[str, Any]
    trial: int | None = None
    purpose: str = ""
    basis: str = "measured"
    outcome: str | None = None
    fits: bool | None = None
    why: str = ""
    tokens_per_second: SpeedsRow | float | None = None
    spread: SpeedsRow = SpeedsRow()
    peak_memory_bytes: float | None = None
    over_bytes: float | None = None
    phase: str | None = None
    cause: str | None = None
    evidence: str = ""
    excerpt: str = ""
    seconds: Mapping[str, float] = {}
    timed_cycles: int = 0
    phase_peak_bytes: Mapping[str, float] = {}
    phase_seconds: Mapping[str, float] = {}
    prediction: PredictionRow | None = None

    @property
    def rate(self) -> float | None:
        """Tokens per second at typical lengths if known, else at the longest; like the
        recommendation's.
        """
        if isinstance(self.tokens_per_second, SpeedsRow):
            return self.tokens_per_second.typical or self.tokens_per_second.worst
        if self.basis == "predicted" and self.prediction is not None:
            at_lengths = self.prediction.tokens_per_second_at_lengths
            if at_lengths is not None:
                return at_lengths.value
        return self.tokens_per_second

    @property
    def rate_spread(self) -> float | None:
        """Relative half width of that speed's interval; None: predicted, or not known."""
        return self.spread.typical or self.spread.worst

    @property
    def rate_at_longest(self) -> float | None:
        """Tokens per second at the longest lengths."""
        rates = self.tokens_per_second
        return rates.worst if isinstance(rates, SpeedsRow) else rates


class TradeOffRow(msgspec.Struct, frozen=True, kw_only=True):
    """Candidate with other learning knobs."""

    change: Mapping[str, Any]
    knobs: Mapping[str, Any] | None = None
    basis: str = "measured"
    outcome: str | None = None
    fits: bool | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: float | None = None
    prediction: PredictionRow | None = None


class CertificateItemRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: str
    says: str = ""


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str | None = None
    peak_bytes: float | None = None
    measured_by: str | None = None
    why: str | None = None


class RankModelsRow(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a rank's model tensors, by part."""

    rank: int
    bytes: Mapping[str, float] = {}


class CertificateRow(msgspec.Struct, frozen=True, kw_only=True):
    """Longer worst-case probe of the winner."""

    trial: int | None = None
    outcome: str | None = None
    complete: bool | None = None
    items: tuple[CertificateItemRow, ...] = ()
    why: str = ""
    peak_bytes: float | None = None
    limit_bytes: float | None = None
    margin_bytes: float | None = None
    headroom_bytes: float | None = None
    headroom_why: str | None = None
    peak_by: str | None = None
    devices: tuple[DeviceRow, ...] = ()
    models: tuple[RankModelsRow, ...] = ()
    bound_by: str | None = None
    verified_on_several_gpus: bool | None = None
    optimizer_steps: int | None = None
    timed_cycles: float | None = None
    left_out_cycles: int = 0
    steady: bool | None = None
    rank_skew: Mapping[str, float] = {}
    longest_completion_tokens: int | None = None
    torch_allocated_bytes: float | None = None
    torch_reserved_bytes: float | None = None
    torch_reserved_why: str | None = None
    allocation_retries: int | None = None
    phase_seconds: Mapping[str, float] = {}
    user_reward_seconds: float | None = None
    effective: Mapping[str, Any] = {}


class RecommendationRow(msgspec.Struct, frozen=True, kw_only=True):
    """Winner."""

    knobs: Mapping[str, Any]
    settings: Mapping[str, Any] = {}
    changed_learning_knobs: Mapping[str, Any] = {}
    relaxed: Mapping[str, Any] = {}
    basis: str = "measured"
    tokens_per_second: SpeedsRow = SpeedsRow()
    spread: SpeedsRow = SpeedsRow()
    peak_memory_bytes: float | None = None
    limit_bytes: float | None = None
    phase_peak_bytes: Mapping[str, float] = {}
    certificate: Mapping[str, Any] | None = None
    prediction: PredictionRow | None = None
    files: tuple[str, ...] = ()

    @property
    def confirmed(self) -> CertificateRow | None:
        """Return the certificate with the types of its known fields."""
        if not self.certificate:
            return None
        return msgspec.convert(self.certificate, CertificateRow, strict=False)

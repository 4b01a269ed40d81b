"""Prediction: what was computed about a candidate, never measured; always with an interval.

Nothing here turns into a Measurement: the two are told apart by type, in storage and in print.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autotune.measurement import Phase

Basis = Literal["traced", "generic"]
"""`traced`: the framework's own step was followed; `generic`: a plain Hugging Face step stood in for one that cannot be."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure and how far it can be off: the truth is expected between `low` and `high`."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"an estimate lies within its own interval, and {self.value} is not in {self.low}..{self.high}")

    @classmethod
    def exactly(cls, value: float) -> Estimate:
        return cls(value=value, low=value, high=value)

    def __add__(self, other: Estimate) -> Estimate:
        """Errors that may well have one cause: they add up."""
        return Estimate(value=self.value + other.value, low=self.low + other.low, high=self.high + other.high)

    def scaled(self, factor: float) -> Estimate:
        return Estimate(value=self.value * factor, low=self.low * factor, high=self.high * factor)


@dataclass(frozen=True, kw_only=True)
class PhasePrediction:
    """One of the eight phases."""

    name: Phase
    peak_bytes: Estimate
    """What the device shows at most while it runs."""

    seconds: Estimate | None
    """Seconds of one generation cycle; None where no speed is known for this hardware."""

    parts: Mapping[str, int] = field(default_factory=dict)
    """What holds the memory at this phase's peak, by name; sums to `peak_bytes.value`."""


@dataclass(frozen=True, kw_only=True)
class EngineFit:
    """What the rollout engine would find: vLLM's own arithmetic."""

    kv_cache_bytes: Estimate
    """What is left for its cache inside its reservation."""

    kv_cache_tokens: int
    """Tokens that fit into it."""

    concurrency: float
    """Sequences of the longest length that fit at a time."""

    longest_length: int
    """The longest sequence for which the cache suffices."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One candidate on one kind of hardware."""

    candidate_id: str
    basis: Basis
    fits: bool | None
    """None where the limit lies inside the interval, or where a fact that decides it was not given."""

    depends_on: tuple[str, ...] = ()
    """What would have to be known to decide, in words."""

    failure: str | None = None
    """The error that would be raised, where the reason is not just the sum: the engine's own words."""

    limit_bytes: int
    peak_memory_bytes: Estimate
    """What the device shows (NVML), per GPU, the worst rank."""

    torch_peak_allocated_bytes: Estimate
    torch_peak_reserved_bytes: Estimate
    host_memory_bytes: Estimate | None = None
    phases: tuple[PhasePrediction, ...] = ()
    """In the order in which a cycle runs them."""

    breakdown: Mapping[str, int] = field(default_factory=dict)
    """At the peak; sums to `peak_memory_bytes.value`."""

    engine: EngineFit | None = None
    tokens_per_second: Estimate | None = None
    """As the design counts them, at the longest lengths."""

    effective: Mapping[str, object] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    """What nobody stated and the prediction took for granted."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages whose code was followed."""

    @property
    def margin_bytes(self) -> Estimate:
        peak = self.peak_memory_bytes
        return Estimate(value=self.limit_bytes - peak.value, low=self.limit_bytes - peak.high, high=self.limit_bytes - peak.low)

    @property
    def peak_phase(self) -> PhasePrediction | None:
        """The highest; of equally high ones the one that fills most of it, for the others show the cache that it left behind."""
        return max(self.phases, key=lambda phase: (phase.peak_bytes.value, -phase.parts.get("fragmentation", 0)), default=None)

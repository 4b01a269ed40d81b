"""Headroom: memory below the limit that a recommendation leaves free.

    M   peak of the certificate: the worst of its runs, at all lengths
    m   lowest peak of a run at the longest lengths
    left free by default:     max(DEFAULT_SHARE · limit, M - m)
    left free by --headroom:  what it states; 0 accepts a peak at the limit

Example: limit 40 GiB, peaks 36.0 and 37.1 GiB: max(0.8, 1.1) = 1.1 GiB.

Whether a candidate fits is a matter of the limit alone. The headroom decides which of those that
fit is recommended.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.measurement import Memory, Verdict
from autotune.core.units import format_bytes

DEFAULT_SHARE = 0.02  # of the limit


@dataclass(frozen=True, kw_only=True)
class RequiredHeadroom:
    bytes: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Headroom:
    least_bytes: int = 0
    covers_spread: bool = False  # also as much as the peaks of the same candidate differ
    why: str = "none is required"

    def required(self, memory: Memory) -> RequiredHeadroom:
        """Return what this candidate has to leave free."""
        spread = memory.spread_bytes
        if self.covers_spread and spread > self.least_bytes:
            return RequiredHeadroom(bytes=spread, why="the spread of its own peaks")
        return RequiredHeadroom(bytes=self.least_bytes, why=self.why)

    def judge(self, verdict: Verdict, memory: Memory) -> Verdict:
        """Return the verdict on recommending what fits by the given verdict."""
        margin = verdict.margin_bytes
        required = self.required(memory)
        if not verdict.fits or margin is None or margin >= required.bytes:
            return verdict
        why = (
            f"{verdict.why}: {format_bytes(margin)} would be left, and"
            f" {format_bytes(required.bytes)} is to stay free ({required.why}). --headroom 0"
            " accepts it"
        )
        return Verdict(
            fits=False,
            why=why,
            margin_bytes=margin,
        )


NO_HEADROOM = Headroom()


def default_headroom(limit_bytes: int) -> Headroom:
    return Headroom(
        least_bytes=round(DEFAULT_SHARE * limit_bytes),
        covers_spread=True,
        why=f"{DEFAULT_SHARE:.0%} of the limit",
    )

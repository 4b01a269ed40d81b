"""Lengths of completions or prompts as they occur, in tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean

MAX_SAMPLE = 512  # quantiles that are kept of a longer list
P95 = 0.95


@dataclass(frozen=True)
class TokenLengths:
    """Sample of lengths, sorted."""

    source: str  # as the user named it
    sample: tuple[int, ...]
    stages: tuple[TokenLengths, ...] = ()  # equal parts of training, where lengths change; empty: they do not

    @classmethod
    def of(cls, source: str, lengths: Iterable[float]) -> TokenLengths:
        """Return the lengths; of a long list, its quantiles."""
        ordered = sorted(max(1, round(length)) for length in lengths)
        if not ordered:
            raise ValueError("no lengths")
        if len(ordered) > MAX_SAMPLE:
            ordered = [ordered[int((place + 0.5) / MAX_SAMPLE * len(ordered))] for place in range(MAX_SAMPLE)]
        return cls(source, tuple(ordered))

    @classmethod
    def lognormal(cls, source: str, mean: float, p95: float) -> TokenLengths:
        """Return quantiles of a lognormal distribution.

        mean = exp(m + s²/2); p95 = exp(m + z·s), z: 95 % quantile of the normal distribution; so
        ln(p95 / mean) = z·s - s²/2, whose smaller root is s.
        """
        z, ratio = NormalDist().inv_cdf(P95), math.log(p95 / mean)
        if ratio < 0 or z * z < 2 * ratio:
            raise ValueError(f"a lognormal distribution has its 95 % quantile at 1 to {math.exp(z * z / 2):.1f} times its mean")
        sigma = z - math.sqrt(z * z - 2 * ratio)
        middle = math.log(mean) - sigma * sigma / 2
        quantiles = ((place + 0.5) / MAX_SAMPLE for place in range(MAX_SAMPLE))
        return cls.of(source, (math.exp(middle + sigma * NormalDist().inv_cdf(share)) for share in quantiles))

    @classmethod
    def changing(cls, source: str, stages: Iterable[TokenLengths]) -> TokenLengths:
        """Return the lengths of a whole training, whose parts have these."""
        parts = tuple(stages)
        return replace(cls.of(source, (length for part in parts for length in part.sample)), stages=parts)

    @property
    def parts(self) -> tuple[TokenLengths, ...]:
        return self.stages or (self,)

    @property
    def mean(self) -> float:
        return fmean(self.sample)

    def quantile(self, share: float) -> int:
        return self.sample[min(len(self.sample) - 1, int(share * len(self.sample)))]

    def up_to(self, longest: int) -> TokenLengths:
        """Return the lengths, cut at the longest that is generated."""
        sample = tuple(min(length, longest) for length in self.sample)
        return TokenLengths(self.source, sample, tuple(part.up_to(longest) for part in self.stages))

    def draw(self, count: int, seed: int = 0) -> list[int]:
        """Return lengths of a batch: evenly spaced quantiles in random order."""
        chance = random.Random(seed)
        drawn = [self.quantile((place + chance.random()) / count) for place in range(count)]
        chance.shuffle(drawn)
        return drawn

    def expected_longest(self, count: int) -> float:
        """Return the expected maximum of `count` independent lengths.

        E[max] = sum over the sorted sample of length · ((i/n)^count - ((i-1)/n)^count)
        """
        size = len(self.sample)
        return sum(
            length * ((place / size) ** count - ((place - 1) / size) ** count) for place, length in enumerate(self.sample, 1)
        )

"""For stock samplers, which know nothing of what a load costs: stay on a loaded model while that promises anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autotune.candidate import Candidate
from autotune.study.preference import Tier
from autotune.study.table import Places
from autotune.study.view import View, speed_of
from autotune.study.worth import GAIN

PATIENCE = 12
"""Stop after this many probes without an improvement, once every load of the tier was tried."""

HOPELESS = 0.6
"""Leave a loaded model or engine whose best stays below this share of the incumbent, after TRIED probes on it."""

TRIED = 4


def on_one_load(tier: Tier, pool: Places, loads: Places, numbers: Mapping[str, int], seen: View) -> Places:
    """The part of the pool that the live rig can measure without loading, while that promises anything."""
    hopeless = _hopeless(tier, numbers, seen)
    live = numbers.get(seen.probes[-1].candidate.load_key) if seen.probes else None
    if live is not None and live not in hopeless and (loads[pool] == live).any():
        return np.asarray(pool[loads[pool] == live])
    untried = pool[~np.isin(loads[pool], list(hopeless))]
    return untried if len(untried) else pool


def _hopeless(tier: Tier, numbers: Mapping[str, int], seen: View) -> set[int]:
    best = max((speed_of(trial) for trial in seen.contenders(tier)), default=0.0)
    by_load: dict[str, list[float]] = {}
    for trial in seen.probed_in(tier):
        by_load.setdefault(trial.candidate.load_key, []).append(speed_of(trial))
    return {
        numbers[key]
        for key, speeds in by_load.items()
        if key in numbers and len(speeds) >= TRIED and max(speeds) < HOPELESS * best
    }


def stopped_improving(tier: Tier, pool: Sequence[Candidate], seen: View) -> bool:
    """Whether every load was tried, and the last PATIENCE probes brought nothing."""
    probed = seen.probed_in(tier)
    tried = {trial.candidate.load_key for trial in probed}
    if any(candidate.load_key not in tried for candidate in pool):
        return False
    best, since = 0.0, 0
    for trial in probed:
        speed = speed_of(trial) if trial.verdict.fits else 0.0
        since = 0 if speed > best * (1 + GAIN) else since + 1
        best = max(best, speed)
    return since >= PATIENCE

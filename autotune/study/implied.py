"""What one outcome settles about others, from the knobs' own declarations of how they move memory.

If a candidate ran out of memory, whatever needs at least as much runs out too. An engine that found
too little memory for itself (cache, start-up) says nothing of the kind: there more is better. And what
could not even be loaded cannot be loaded for the next candidate either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from autotune.candidate import Candidate
from autotune.measurement import Measurement, Outcome
from autotune.recommendation import Trial
from autotune.space import Knob, SearchSpace

_WANTS_MORE = frozenset({"kv_cache", "engine_startup"})


def needs_at_least(space: SearchSpace, bigger: Candidate, smaller: Candidate) -> bool:
    """Whether `bigger` is known to need at least the memory of `smaller`; False where that is not known."""
    return all(_at_least(knob, bigger, smaller) for knob in space.knobs)


def ran_out(measurement: Measurement) -> bool:
    """Whether the outcome is of the kind that rules out everything bigger."""
    if measurement.outcome is Outcome.OK:
        return measurement.memory.peak_bytes is not None and measurement.memory.peak_bytes > measurement.memory.limit_bytes
    cause = measurement.failure.cause if measurement.failure else None
    return measurement.outcome.is_out_of_memory and cause not in _WANTS_MORE


def implied_by(space: SearchSpace, trials: Iterable[Trial], candidates: Iterable[Candidate]) -> set[str]:
    """Ids of the candidates that cannot fit, given what ran out of memory so far."""
    trials = list(trials)
    culprits = [trial.candidate for trial in trials if ran_out(trial.measurement)]
    unloadable = {trial.candidate.load_key for trial in trials if trial.measurement.outcome is Outcome.OOM_LOAD}
    return {
        candidate.id
        for candidate in candidates
        if candidate.load_key in unloadable or any(needs_at_least(space, candidate, culprit) for culprit in culprits)
    }


def least_demanding(space: SearchSpace, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that no other is known to need less than: if none of them fits, nothing does."""
    pool = list(candidates)
    return [one for one in pool if not any(_strictly_smaller(space, other, one) for other in pool)]


def _strictly_smaller(space: SearchSpace, other: Candidate, one: Candidate) -> bool:
    return other != one and needs_at_least(space, one, other) and not needs_at_least(space, other, one)


def _at_least(knob: Knob, bigger: Candidate, smaller: Candidate) -> bool:
    if knob.memory == "none":
        return True
    big, small = _acting(knob, bigger), _acting(knob, smaller)
    if big == small:
        return True
    if knob.memory == "unclear" or not isinstance(big, (int, float)) or not isinstance(small, (int, float)):
        return False
    return big > small if knob.memory == "grows" else big < small


def _acting(knob: Knob, candidate: Candidate) -> object:
    """The value by which the knob acts on memory; None where it does not apply or is not known."""
    if not knob.through:
        return candidate.knobs.get(knob.name)
    factors = [candidate.settings.get(name) for name in knob.through]
    return math.prod(factor for factor in factors if isinstance(factor, int)) if all(factors) else None

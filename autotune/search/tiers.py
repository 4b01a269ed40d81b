"""Tiers: groups of candidates with equal learning knobs, most preferred first.

Tokens per second are compared within a tier. Between tiers the space's declared order decides: the
knob that relaxes first varies fastest, so the first tier that fits preserves the most protected
knobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.core.space import Candidate, KnobValue, SearchSpace


@dataclass(frozen=True, kw_only=True)
class Tier:
    """All candidates with the same learning knobs."""

    learning: dict[str, KnobValue]  # Common values of the learning knobs
    candidates: tuple[Candidate, ...]


def tiers_of(space: SearchSpace, candidates: Iterable[Candidate]) -> tuple[Tier, ...]:
    """Group the candidates, most preferred tier first; a space for throughput alone is a single tier."""
    if space.objective == "throughput":
        return (Tier(learning={}, candidates=tuple(candidates)),)
    groups: dict[tuple[int, ...], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(_rank(space, candidate), []).append(candidate)
    return tuple(
        Tier(learning=learning_values(space, members[0]), candidates=tuple(members)) for _, members in sorted(groups.items())
    )


def learning_values(space: SearchSpace, candidate: Candidate) -> dict[str, KnobValue]:
    """Return the candidate's learning knobs, which identify its tier."""
    knobs = space.learning_knobs(candidate.settings)
    return {knob.name: candidate.knobs[knob.name] for knob in knobs if knob.name in candidate.knobs}


def _rank(space: SearchSpace, candidate: Candidate) -> tuple[int, ...]:
    """Return each learning knob's position in its preference order, the most protected knob first."""
    learning = space.learning_knobs(candidate.settings)
    never_relaxed = [knob for knob in learning if knob.name not in space.relax]
    relaxed = sorted((knob for knob in learning if knob.name in space.relax), key=lambda knob: -space.relax.index(knob.name))
    ordered = (knob for knob in [*never_relaxed, *relaxed] if knob.name in candidate.knobs)
    return tuple(knob.choices.index(candidate.knobs[knob.name]) for knob in ordered)

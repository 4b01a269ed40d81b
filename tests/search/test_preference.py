"""Tiers: equal learning knobs, in relaxation order."""

from __future__ import annotations

from pathlib import Path

from autotune.search.loop import legal_candidates
from autotune.search.trial_view import tiers_of
from tests.simulated import ToyTrainer, toy_job, toy_space

SPACE = toy_space()
CANDIDATES = legal_candidates(toy_job(Path("/nowhere"), SPACE, 1), ToyTrainer())


def test_the_first_to_relax_varies_fastest() -> None:
    tiers = [tuple(tier.learning.values()) for tier in tiers_of(SPACE, CANDIDATES)]
    assert tiers == [(8, 64), (4, 64), (8, 32), (4, 32)]


def test_every_candidate_is_in_one_tier() -> None:
    tiers = tiers_of(SPACE, CANDIDATES)
    assert sorted(candidate.id for tier in tiers for candidate in tier.candidates) == sorted(
        c.id for c in CANDIDATES
    )

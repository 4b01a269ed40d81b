"""Tiers, and what an outcome implies."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from autotune.measurement import Outcome
from autotune.study.implied import implied_by, least_demanding, needs_at_least
from autotune.study.preference import tiers_of
from autotune.study.view import View
from autotune.tune import legal_candidates
from tests.simulated import MIB, Machine, ToyTrainer, toy_question, toy_space

SPACE = toy_space()
CANDIDATES = legal_candidates(toy_question(Path("/nowhere"), SPACE, 1), ToyTrainer())


def test_the_first_to_relax_varies_fastest() -> None:
    tiers = [tuple(tier.learning.values()) for tier in tiers_of(SPACE, CANDIDATES)]
    assert tiers == [(8, 64), (4, 64), (8, 32), (4, 32)]


def test_every_candidate_is_in_one_tier() -> None:
    tiers = tiers_of(SPACE, CANDIDATES)
    assert sorted(candidate.id for tier in tiers for candidate in tier.candidates) == sorted(c.id for c in CANDIDATES)


@given(st.integers(100, 3000))
def test_implications_never_rule_out_what_fits(limit: int) -> None:
    machine = Machine(limit_bytes=limit * MIB)
    out = [c for c in CANDIDATES if machine.need(c) > machine.limit_bytes]
    measured = [machine.measure(candidate, plan) for candidate, plan in ((c, _plan()) for c in out[:3])]
    trials = [_trial(c, m) for c, m in zip(out, measured, strict=False)]
    ruled_out = implied_by(SPACE, trials, CANDIDATES)
    assert all(machine.need(c) > machine.limit_bytes for c in CANDIDATES if c.id in ruled_out)


@given(st.sampled_from(CANDIDATES), st.sampled_from(CANDIDATES))
def test_needing_at_least_as_much_agrees_with_the_machine(one: object, other: object) -> None:
    machine = Machine(limit_bytes=MIB)
    if needs_at_least(SPACE, one, other):  # type: ignore[arg-type]
        assert machine.need(one) >= machine.need(other)  # type: ignore[arg-type]


def test_the_least_demanding_bound_all_others() -> None:
    least = least_demanding(SPACE, CANDIDATES)
    assert all(any(needs_at_least(SPACE, candidate, one) for one in least) for candidate in CANDIDATES)
    assert len(least) == 2  # one without and one with the engine


def test_an_engine_that_wants_more_rules_out_nothing_bigger() -> None:
    from dataclasses import replace

    machine = Machine(limit_bytes=1)
    starved = next(c for c in CANDIDATES if c.knobs.get("share") == 0.1)
    measurement = machine.measure(starved, _plan())
    assert measurement.failure is not None
    measurement = replace(measurement, failure=replace(measurement.failure, cause="kv_cache"))
    assert implied_by(SPACE, [_trial(starved, measurement)], CANDIDATES) == set()


def test_what_cannot_be_loaded_is_not_loaded_again() -> None:
    from dataclasses import replace

    machine = Machine(limit_bytes=1)
    starved = next(c for c in CANDIDATES if c.knobs.get("share") == 0.1)
    measurement = machine.measure(starved, _plan())
    assert measurement.failure is not None
    failure = replace(measurement.failure, cause="kv_cache", phase="load")
    measurement = replace(measurement, outcome=Outcome.OOM_LOAD, failure=failure)
    ruled_out = implied_by(SPACE, [_trial(starved, measurement)], CANDIDATES)
    assert ruled_out == {c.id for c in CANDIDATES if c.load_key == starved.load_key}


def test_a_view_without_trials_knows_nothing() -> None:
    seen = View(SPACE, tiers_of(SPACE, CANDIDATES), ())
    assert seen.best() is None and seen.tier_of_choice() is None and seen.usual_seconds(load=True) == 0.0


def _plan():  # type: ignore[no-untyped-def]
    from autotune.tune import SHORT

    return SHORT


def _trial(candidate, measurement):  # type: ignore[no-untyped-def]
    from autotune.recommendation import Trial
    from autotune.verdict import judge

    return Trial(number=0, purpose="search", candidate=candidate, measurement=measurement, verdict=judge(measurement))

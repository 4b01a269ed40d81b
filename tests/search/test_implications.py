"""Implications of one outcome for other candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product, starmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.answer import Trial
from autotune.core.measurement import Failure, Measurement, Outcome, Phase, judge
from autotune.core.space import Candidate, Knob, KnobValue
from autotune.search.loop import SHORT_PROBE, legal_candidates
from autotune.search.surrogate.candidate_table import CandidateTable
from autotune.search.surrogate.implications import Implied, implications_of
from tests.simulated import MIB, Machine, ToyTrainer, toy_job, toy_space

SPACE = toy_space()
CANDIDATES = legal_candidates(toy_job(Path("/nowhere"), SPACE, 1), ToyTrainer())
TABLE = CandidateTable(SPACE, CANDIDATES)


def _engine(share: float, length: int) -> Candidate:
    return Candidate(
        knobs={"share": share, "length": length},
        settings={"share": share, "length": length},
        load={
            "vllm_gpu_memory_utilization": share,
            "vllm_max_model_length": length,
            "dtype": "bfloat16",
        },
    )


ENGINES = tuple(starmap(_engine, product((0.3, 0.5, 0.7), (512, 1024))))


def _trial(candidate: Candidate, measurement: Measurement) -> Trial:
    return Trial(
        number=0,
        purpose="search",
        candidate=candidate,
        measurement=measurement,
        verdict=judge(measurement),
    )


def _measured(machine: Machine, candidates: Sequence[Candidate]) -> list[Trial]:
    return [_trial(candidate, machine.measure(candidate, SHORT_PROBE)) for candidate in candidates]


def _failed(
    candidate: Candidate,
    failure: Failure,
    outcome: Outcome = Outcome.OOM_LOAD,
) -> Trial:
    measured = Machine(limit_bytes=2**40).measure(CANDIDATES[0], SHORT_PROBE)
    return _trial(
        candidate,
        replace(
            measured,
            candidate_id=candidate.id,
            outcome=outcome,
            failure=failure,
            worst=None,
        ),
    )


def _settled(trial: Trial, table: CandidateTable) -> set[Candidate]:
    settled = set()
    for index in np.flatnonzero(implications_of(table, [trial]).impossible):
        settled.add(table.candidates[index])
    return settled


def _settled_shares(trial: Trial, table: CandidateTable) -> set[object]:
    return {candidate.knobs["share"] for candidate in _settled(trial, table)}


def _with_knobs(candidates: Sequence[Candidate], **knobs: object) -> Candidate:
    return next(candidate for candidate in candidates if candidate.knobs == knobs)


@given(st.integers(100, 3000), st.lists(st.sampled_from(CANDIDATES), min_size=1, max_size=6))
def test_facts_are_never_wrong(limit: int, measured: list[Candidate]) -> None:
    machine = Machine(limit_bytes=limit * MIB)
    implications = implications_of(TABLE, _measured(machine, measured))
    for index, candidate in enumerate(CANDIDATES):
        fits = machine.need(candidate) <= machine.limit_bytes
        assert not (implications.impossible[index] and fits)
        assert not (implications.possible[index] and not fits)
    for row in TABLE.rows_of(measured):
        assert implications.impossible[row] or implications.possible[row]


@given(
    limit=st.integers(200, 1500),
    measured=st.lists(st.sampled_from(CANDIDATES), max_size=8),
    steps=st.lists(st.integers(0, 8)),
)
def test_incremental_implications_equal_those_computed_at_once(
    limit: int,
    measured: list[Candidate],
    steps: list[int],
) -> None:
    """However many are added between two questions; and where some are taken back, it is thought
    over again.
    """
    machine = Machine(limit_bytes=limit * MIB)
    implied = Implied(TABLE)
    trials = _measured(machine, measured)
    for number in steps:
        incremental = implied.after(trials[:number])
        anew = implications_of(TABLE, trials[:number])
        assert (incremental.impossible == anew.impossible).all()
        assert (incremental.possible == anew.possible).all()


@given(st.sampled_from(CANDIDATES))
def test_needing_at_least_as_much_agrees_with_the_machine(candidate: Candidate) -> None:
    machine = Machine(limit_bytes=MIB)
    index = TABLE.row_by_id[candidate.id]
    for row in np.flatnonzero(TABLE.demanding_at_least(index)):
        assert machine.need(CANDIDATES[row]) >= machine.need(candidate)
    for row in np.flatnonzero(TABLE.demanding_at_most(index)):
        assert machine.need(CANDIDATES[row]) <= machine.need(candidate)


@pytest.mark.parametrize("backwards", [False, True])
def test_no_candidate_needs_less_than_the_least_demanding(backwards: bool) -> None:
    """Two incomparable loads have two minima; the first one counts."""
    indices = np.arange(len(TABLE))[:: -1 if backwards else 1]
    least = [index for index in indices if TABLE.demanding_at_most(index).sum() == 1]
    assert len(least) == 2  # one without and one with the engine
    assert TABLE.least_demanding(indices) == least[0]
    remaining = indices[indices != least[0]]
    assert TABLE.least_demanding(remaining) != least[0]


def test_a_load_that_failed_is_not_repeated() -> None:
    starved = next(candidate for candidate in CANDIDATES if candidate.knobs.get("share") == 0.1)
    failed = _failed(
        starved,
        Failure(
            evidence="no room",
            phase="load",
            cause="kv_cache",
        ),
    )
    assert _settled(failed, TABLE) == {
        candidate for candidate in CANDIDATES if candidate.load_key == starved.load_key
    }


def test_too_small_a_cache_rules_out_smaller_shares_and_longer_sequences_only() -> None:
    table = CandidateTable(SPACE, ENGINES)
    failed = _with_knobs(ENGINES, share=0.5, length=512)
    implied = _settled(
        _failed(
            failed,
            Failure(
                evidence="no blocks",
                phase="load",
                cause="kv_cache",
                row="vllm_kv_too_small",
            ),
        ),
        table,
    )
    assert implied == {engine for engine in ENGINES if float(engine.knobs["share"] or 0) <= 0.5}


def test_an_engine_that_was_never_started_has_no_more_room_for_being_one_that_sleeps() -> None:
    pairs = []
    for share in (0.3, 0.5):
        for sleeps in (True, False):
            pairs.append((share, sleeps))
    loads = []
    for share, sleeps in pairs:
        loads.append({"vllm_gpu_memory_utilization": share, "vllm_enable_sleep_mode": sleeps})
    awake_or_not = []
    for load in loads:
        awake_or_not.append(
            Candidate(
                knobs=load,
                settings=load,
                load=load,
            )
        )
    table = CandidateTable(SPACE, awake_or_not)
    failed = awake_or_not[0]
    starting = Failure(
        evidence="no blocks",
        phase="load",
        cause="kv_cache",
        row="vllm_kv_too_small",
    )
    assert _settled(_failed(failed, starting), table) == set(awake_or_not[:2])
    later = replace(starting, phase="rollout")
    assert _settled(_failed(failed, later, Outcome.OOM_ROLLOUT), table) == {failed}, (
        "by then it may have slept"
    )


def test_too_large_a_reservation_rules_out_larger_ones_and_those_above_the_free_share() -> None:
    table = CandidateTable(SPACE, ENGINES)
    failed = _with_knobs(ENGINES, share=0.7, length=512)
    full = Failure(
        evidence="less than desired",
        phase="load",
        cause="engine_startup",
        row="vllm_reservation",
    )
    assert _settled_shares(_failed(failed, full), table) == {0.7}
    completed = replace(full, numbers={"free_share": 0.4})
    assert _settled_shares(_failed(failed, completed), table) == {0.5, 0.7}


def test_a_free_share_of_the_device_is_compared_as_one_of_the_limit() -> None:
    """Half of the device is the limit: a share of 0.7 of it was asked for as 0.35, and 0.3 is free
    there, which is 0.6 of the limit.
    """
    table = CandidateTable(SPACE, ENGINES)
    failed = _with_knobs(ENGINES, share=0.7, length=512)
    full = Failure(
        evidence="less than desired",
        phase="load",
        cause="engine_startup",
        row="vllm_reservation",
        numbers={"free_share": 0.3, "asked_share": 0.35},
    )
    assert _settled_shares(_failed(failed, full), table) == {0.7}


def test_other_failures_imply_nothing() -> None:
    for outcome in (Outcome.CRASH, Outcome.TIMEOUT, Outcome.ILLEGAL):
        assert not _settled(_failed(CANDIDATES[0], Failure(evidence="a bug"), outcome), TABLE)


SLEEP = Knob(
    name="vllm_enable_sleep_mode",
    choices=(True, False),
    effect="neutral",
    memory="shrinks",
    says="sleeps",
)
SLEEPING = replace(SPACE, knobs=(*SPACE.knobs, SLEEP))


def _sleeper(
    batch: int,
    share: float,
    sleeps: bool,
) -> Candidate:
    knobs: dict[str, KnobValue] = {
        "batch": batch,
        "share": share,
        "use_vllm": True,
        SLEEP.name: sleeps,
    }
    return Candidate(
        knobs=knobs,
        settings=knobs,
        load={"share": share, SLEEP.name: sleeps},
    )


ASLEEP_OR_NOT = tuple(starmap(_sleeper, product((1, 2, 4, 8), (0.1, 0.2), (True, False))))


@pytest.mark.parametrize("outcome", [Outcome.OOM_SYNC, Outcome.OOM_ROLLOUT])
def test_beside_an_engine_that_sleeps_through_training_no_smaller_batch_helps(
    outcome: Outcome,
) -> None:
    table = CandidateTable(SLEEPING, ASLEEP_OR_NOT)

    def implied(
        share: float,
        sleeps: bool,
        ended: Outcome,
    ) -> set[tuple[object, ...]]:
        knobs = {"batch": 4, "share": share, "use_vllm": True, SLEEP.name: sleeps}
        failed = _with_knobs(ASLEEP_OR_NOT, **knobs)
        phase: Phase = "sync" if ended is Outcome.OOM_SYNC else "rollout"
        ruled_out = _settled(
            _failed(failed, Failure(evidence="out of memory", phase=phase), ended), table
        )
        choices = set()
        for candidate in ruled_out:
            knobs = candidate.knobs
            choices.add((knobs["batch"], knobs["share"], knobs[SLEEP.name]))
        return choices

    every, large = (1, 2, 4, 8), (4, 8)
    either = (True, False)
    assert implied(0.2, True, outcome) == set(product(every, [0.2], either))
    assert implied(0.2, True, Outcome.OOM_BACKWARD) == set(product(large, [0.2], either))
    assert implied(0.2, False, outcome) == set(product(large, [0.2], [False])), (
        "what training keeps is still there"
    )
    assert len(implied(0.1, True, outcome)) == len(ASLEEP_OR_NOT), "nor does a larger share"

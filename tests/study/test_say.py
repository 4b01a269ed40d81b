"""Which knobs have a say in how far predictions are off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from autotune.candidate import Candidate, KnobValue
from autotune.study.regression import Kernels, Observed, posterior
from autotune.study.table import Numbers, Table
from autotune.tune import legal_candidates
from tests.simulated import ToyTrainer, toy_question, toy_space

SPACE = toy_space(num_generations=(8,), max_completion_length=(64,))
TABLE = Table(SPACE, legal_candidates(toy_question(Path("/nowhere"), SPACE, 1), ToyTrainer()))
ENGINE = next(one for one in TABLE.candidates if one.knobs.get("share") is not None)


def beside(knob: str, others: Mapping[str, KnobValue] = ENGINE.knobs) -> int:
    """One that differs from the engine's first candidate in this knob alone."""
    return next(
        place
        for place, one in enumerate(TABLE.candidates)
        if set(one.knobs) == set(others) and {name for name in others if one.knobs[name] != others[name]} == {knob}
    )


def doubts(figures: Numbers | None) -> Callable[[str], float]:
    """How far one that differs in a knob may be from one that was measured."""
    here = TABLE.place[ENGINE.id]
    observed = Observed(np.array([here]), np.array([0.2]), np.zeros(1))
    found = posterior(Kernels(TABLE, figures=figures), np.full(len(TABLE), 0.3), observed, (0.01,))
    return lambda knob: float(found.ahead_of(here)[1][beside(knob)])


def by(*knobs: str) -> Numbers:
    """Predictions that only these knobs move, by as much for each step."""
    return np.array([sum(0.2 * _steps(one, knob) for knob in knobs) for one in TABLE.candidates])


def _steps(one: Candidate, knob: str) -> int:
    return SPACE[knob].choices.index(one.knobs[knob]) if knob in one.knobs else 0


@pytest.mark.parametrize("moves, does_not", [("batch", "share"), ("share", "batch")])
def test_who_differs_only_in_what_moves_no_prediction_is_off_by_the_same(moves: str, does_not: str) -> None:
    doubt, nobody_said = doubts(by(moves)), doubts(None)
    assert doubt(does_not) < 0.5 * doubt(moves)
    assert doubt(does_not) < 0.6 * nobody_said(does_not)


def test_where_no_knob_moves_the_prediction_it_is_no_guide_to_which_of_them_does() -> None:
    doubt, nobody_said = doubts(np.zeros(len(TABLE))), doubts(None)
    for knob in ("batch", "share"):
        assert doubt(knob) == pytest.approx(nobody_said(knob), rel=0.05)


def test_what_differs_makes_a_difference_of_its_own_however_little_it_moves_the_prediction() -> None:
    assert doubts(by("batch"))("share") > 0.005


def test_a_load_between_two_that_are_alike_is_taken_to_be_like_them() -> None:
    """What a knob of numbers does between two of its values, it does not do for the first time."""
    space = toy_space(num_generations=(8,), max_completion_length=(64,), share=(0.1, 0.2, 0.4, 0.6))
    table = Table(space, legal_candidates(toy_question(Path("/nowhere"), space, 1), ToyTrainer()))
    figures = np.array([0.2 * space["batch"].choices.index(one.knobs["batch"]) for one in table.candidates])
    kernels = Kernels(table, figures=figures)
    ends = {one.knobs["share"]: place for place, one in enumerate(table.candidates) if _is_beside(one)}

    def doubt(value: float, *measured: float) -> float:
        places = np.array([ends[share] for share in measured])
        found = posterior(
            kernels, np.full(len(table), 0.3), Observed(places, np.full(len(places), 0.2), np.zeros(len(places))), (0.01,)
        )
        return float(found.ahead_of(ends[0.1])[1][ends[value]])

    assert doubt(0.4, 0.1, 0.6) < 0.6 * doubt(0.4, 0.1)
    assert doubt(0.4, 0.1, 0.6) < 0.02


def _is_beside(one: Candidate) -> bool:
    return one.knobs.get("share") is not None and one.knobs["batch"] == 1 and bool(one.knobs["checkpointing"])

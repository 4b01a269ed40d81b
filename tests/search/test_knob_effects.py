"""Effect of knobs on prediction errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from autotune.core.space import Candidate, KnobValue
from autotune.search.loop import legal_candidates
from autotune.search.surrogate.candidate_table import CandidateTable, FloatArray
from autotune.search.surrogate.gaussian_process import Fit, Observations
from autotune.search.surrogate.similarity import Kernels
from tests.simulated import ToyTrainer, toy_job, toy_space

SPACE = toy_space(num_generations=(8,), max_completion_length=(64,))
TABLE = CandidateTable(SPACE, legal_candidates(toy_job(Path("/nowhere"), SPACE, 1), ToyTrainer()))
ENGINE = next(
    candidate for candidate in TABLE.candidates if candidate.knobs.get("share") is not None
)


def neighbour(knob: str, knobs: Mapping[str, KnobValue] = ENGINE.knobs) -> int:
    """Return a candidate that differs from the engine's first one in this knob alone."""
    return next(
        index
        for index, candidate in enumerate(TABLE.candidates)
        if set(candidate.knobs) == set(knobs)
        and {name for name in knobs if candidate.knobs[name] != knobs[name]} == {knob}
    )


def doubts(figures: FloatArray | None) -> Callable[[str], float]:
    """Return the deviation between a measured candidate and one that differs in a knob."""
    origin = TABLE.row_by_id[ENGINE.id]
    observed = Observations(np.array([origin]), np.array([0.2]), np.zeros(1))
    posterior = Fit(
        Kernels(TABLE, figures=figures), np.full(len(TABLE), 0.3), observed, (0.01,)
    ).posterior
    return lambda knob: float(posterior.lead_over(origin)[1][neighbour(knob)])


def by(*knobs: str) -> FloatArray:
    """Predictions that only these knobs move, by as much for each step."""
    return np.array(
        [sum(0.2 * _steps(candidate, knob) for knob in knobs) for candidate in TABLE.candidates]
    )


def _steps(candidate: Candidate, knob: str) -> int:
    return SPACE[knob].choices.index(candidate.knobs[knob]) if knob in candidate.knobs else 0


@pytest.mark.parametrize("moves, does_not", [("batch", "share"), ("share", "batch")])
def test_knobs_without_an_effect_on_the_prediction_share_its_error(
    moves: str, does_not: str
) -> None:
    doubt, nobody_said = doubts(by(moves)), doubts(None)
    assert doubt(does_not) < 0.5 * doubt(moves)
    assert doubt(does_not) < 0.6 * nobody_said(does_not)


def test_where_no_knob_moves_the_prediction_it_is_no_guide_to_which_of_them_does() -> None:
    doubt = doubts(np.zeros(len(TABLE)))
    nobody_said = doubts(None)
    for knob in ("batch", "share"):
        assert doubt(knob) == pytest.approx(nobody_said(knob), rel=0.05)


def test_what_differs_makes_a_difference_of_its_own_however_little_it_moves_the_prediction() -> (
    None
):
    assert doubts(by("batch"))("share") > 0.005


def test_a_load_between_two_that_are_alike_is_taken_to_be_like_them() -> None:
    """A numeric knob has an effect between its values too."""
    space = toy_space(
        num_generations=(8,),
        max_completion_length=(64,),
        share=(0.1, 0.2, 0.4, 0.6),
    )
    table = CandidateTable(
        space, legal_candidates(toy_job(Path("/nowhere"), space, 1), ToyTrainer())
    )
    figures = np.array(
        [
            0.2 * space["batch"].choices.index(candidate.knobs["batch"])
            for candidate in table.candidates
        ]
    )
    kernels = Kernels(table, figures=figures)
    ends = {}
    for index, candidate in enumerate(table.candidates):
        if _is_beside(candidate):
            ends[candidate.knobs["share"]] = index

    def doubt(value: float, *measured: float) -> float:
        indices = np.array([ends[share] for share in measured])
        observed = Observations(indices, np.full(len(indices), 0.2), np.zeros(len(indices)))
        posterior = Fit(kernels, np.full(len(table), 0.3), observed, (0.01,)).posterior
        return float(posterior.lead_over(ends[0.1])[1][ends[value]])

    assert doubt(0.4, 0.1, 0.6) < 0.6 * doubt(0.4, 0.1)
    assert doubt(0.4, 0.1, 0.6) < 0.02


def _is_beside(candidate: Candidate) -> bool:
    return (
        candidate.knobs.get("share") is not None
        and candidate.knobs["batch"] == 1
        and bool(candidate.knobs["checkpointing"])
    )

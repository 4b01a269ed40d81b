"""What a search keeps, shows and asks for at its ends: cases whose answer is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from autotune.core.answer import AnswerSource
from autotune.core.errors import BadInput
from autotune.core.files import sqlite_url
from autotune.core.job import Task
from autotune.core.measurement import Cost, Outcome
from autotune.core.space import Candidate
from autotune.search.conclusion import _baseline
from autotune.search.confirmation import next_confirmation
from autotune.search.dashboard_content import best_that_fits
from autotune.search.parameters import _distribution
from autotune.search.pipeline import answer
from autotune.search.problem import legal_candidates
from autotune.search.record import Record
from autotune.search.trial_storage import MEMORY
from autotune.search.trial_view import TrialView
from tests.inline_executor import InlineExecutor
from tests.search.test_beliefs import FITTING, JOB, MACHINE, problem, trial
from tests.search.test_nothing_proven import VERSIONS, _search, _two_candidates
from tests.simulated import MIB, Machine, ToyTrainer, toy_job, toy_request, toy_space

# The dashboard.


def test_the_best_is_the_fastest_whose_constraints_hold() -> None:
    study = optuna.create_study(direction="maximize")
    for value, excess in ((1.0, -0.5), (3.0, -0.1), (9.0, 0.2), (2.0, 0.0)):
        study.add_trial(
            create_trial(
                state=TrialState.COMPLETE,
                value=value,
                constraints={MEMORY: excess},
            )
        )
    best = best_that_fits(study.trials, None)
    recommended = best_that_fits(study.trials, 3)
    assert best is not None and best.value == 3.0
    assert recommended is not None and recommended.value == 2.0


@pytest.mark.parametrize(
    ("choices", "kind"),
    [
        ([1, 2, 8], IntDistribution),
        ([0, 1, 2], CategoricalDistribution),
    ],
)
def test_zero_has_no_place_on_a_logarithmic_scale(choices: list[Any], kind: type) -> None:
    assert isinstance(_distribution(choices), kind)


# The end of a search.


def test_a_baseline_that_was_probed_as_any_candidate_is_found() -> None:
    baseline, rival = FITTING[:2]
    view = TrialView(problem(baseline=baseline), [trial(rival), trial(baseline, 1)])
    shown = _baseline(view, JOB)
    assert shown is not None and shown.candidate == baseline


def test_a_second_finalist_is_confirmed_while_there_is_time_for_it() -> None:
    """A confirmation is expected to take two probes of 50 seconds."""
    first, second = FITTING[:2]

    def lasting(seconds: float, candidate: Candidate, number: int, **parts: Any) -> Any:
        measured = trial(candidate, number, rate=100.0, **parts)
        cost = Cost(total_seconds=seconds, load_seconds=0.0)
        return replace(measured, measurement=replace(measured.measurement, cost=cost))

    trials = [
        lasting(50, first, 0),
        lasting(50, second, 1),
        lasting(60, second, 2, purpose="confirm"),
    ]
    view = TrialView(problem(), trials)
    assert next_confirmation(view, 101.0) is not None
    assert next_confirmation(view, 99.0) is None


def test_an_answer_from_the_record_is_not_stored_as_a_new_one(tmp_path: Path) -> None:
    job = _two_candidates(tmp_path)
    proof = _search(job, Outcome.OOM_BACKWARD)
    record = Record(job, VERSIONS)
    source = AnswerSource(
        when="2026-01-01",
        where="there",
        versions={},
        elapsed_seconds=1.0,
    )
    record.keep_answer(replace(proof, from_record=source))
    assert record.answer() is None
    record.keep_answer(proof)
    restored = record.answer()
    assert restored is not None and restored.from_record is not None
    assert (restored.elapsed_seconds, restored.probe_seconds) == (0.0, 0.0), "nothing was measured"


def test_the_folder_of_a_study_is_made(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=900 * MIB)
    out = tmp_path / "new" / "out"
    job = toy_job(
        tmp_path,
        toy_space(),
        machine.limit_bytes,
        out=out,
        storage=sqlite_url(out / "study.db"),
        max_probes=2,
        fresh=True,
    )
    trainer = ToyTrainer()
    result = answer(
        toy_request(job, trainer),
        legal_candidates(job, trainer),
        InlineExecutor(machine.measure),
        lambda event: None,
    )
    assert result.recommendation.trials
    assert (out / "study.db").exists()


# No legal candidate.


class Refusing(ToyTrainer):
    def why_illegal(self, candidate: Candidate, task: Task) -> str | None:
        return "no batch is legal on this day"


@pytest.mark.parametrize(
    ("batches", "way_out"),
    [((1, 2), "no batch is legal on this day"), ((1,), "Widen it with --search")],
)
def test_a_rule_that_refuses_all_of_several_is_the_way_out(
    batches: tuple[int, ...],
    way_out: str,
) -> None:
    space = toy_space(
        batch=batches,
        checkpointing=(True,),
        use_vllm=(False,),
        num_generations=(8,),
        max_completion_length=(64,),
    )
    job = toy_job(Path("/nowhere"), space, MACHINE.limit_bytes)
    with pytest.raises(BadInput) as refused:
        legal_candidates(job, Refusing())
    assert refused.value.way_out.startswith(way_out)

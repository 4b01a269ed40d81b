"""What probes that show nothing about memory prove, and answers that a later run goes on from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.answer import Recommendation
from autotune.core.job import Job
from autotune.core.measurement import Failure, Measurement, Outcome, ProbePlan
from autotune.core.space import Candidate
from autotune.report.answer_document import document
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.record import Record
from autotune.search.study import open_study
from tests.inline_executor import InlineExecutor
from tests.simulated import MIB, Machine, ToyTrainer, toy_job, toy_space

TOO_SMALL = 100 * MIB  # Every candidate of the toy space needs more
KILLED = Failure(evidence="SIGKILL, sent from outside the probe", from_outside=True)
VERSIONS = {"torch": "2.9.0"}


def _two_candidates(tmp_path: Path) -> Job:
    space = toy_space(
        use_vllm=(False,),
        batch=(4,),
        num_generations=(8,),
        max_completion_length=(64,),
    )
    return toy_job(tmp_path, space, TOO_SMALL)


def _search(job: Job, outcome_with_checkpointing: Outcome) -> Recommendation:
    """Search on a machine on which one of two candidates lacks memory, and the other ends thus."""
    machine = Machine(limit_bytes=TOO_SMALL)

    def measure(candidate: Candidate, plan: ProbePlan) -> Measurement:
        measurement = machine.measure(candidate, plan)
        if not candidate.knobs["checkpointing"]:
            return measurement
        failure = KILLED if outcome_with_checkpointing is Outcome.INTERRUPTED else None
        return replace(measurement, outcome=outcome_with_checkpointing, failure=failure)

    trainer = ToyTrainer()
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    return run_search(
        job,
        study=study,
        executor=InlineExecutor(measure=measure),
        listener=lambda event: None,
        clock=Clock(job.budget_seconds),
    )


@pytest.mark.parametrize(
    ("outcome", "proven", "status"),
    [
        (Outcome.OOM_BACKWARD, "nothing fits", "nothing_fits"),
        (Outcome.INTERRUPTED, "not all measured", "undecided"),
        (Outcome.CRASH, "not proven infeasible", "nothing_fits"),
    ],
)
def test_only_errors_of_memory_prove_that_nothing_fits(
    tmp_path: Path,
    outcome: Outcome,
    proven: str,
    status: str,
) -> None:
    job = _two_candidates(tmp_path)
    answer = _search(job, outcome)
    assert answer.winner is None
    assert answer.proven == proven
    assert document(job, answer, [])["status"] == status
    record = Record(job, VERSIONS)
    record.keep_answer(answer)
    is_stored = record.answer() is not None
    assert is_stored == (outcome is Outcome.OOM_BACKWARD), "only a proof answers the next run"


def test_a_winner_without_confirmation_is_confirmed_by_the_next_run(tmp_path: Path) -> None:
    job = _two_candidates(tmp_path)
    proof = _search(job, Outcome.OOM_BACKWARD)
    unconfirmed = replace(
        proof,
        winner=proof.trials[0],
        proven="budget spent",
        certificate=None,
    )
    record = Record(job, VERSIONS)
    record.keep_answer(unconfirmed)
    assert record.answer() is None
    assert record.has_unfinished_answer()
    record.keep_answer(replace(unconfirmed, certificate=proof.trials[0]))
    assert record.answer() is not None
    assert not record.has_unfinished_answer()

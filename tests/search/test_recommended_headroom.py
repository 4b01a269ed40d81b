"""Headroom in the search: which candidate of a machine whose truth is known is recommended.

Memory and speed by hand from `tests/simulated.py`, limit 900 MiB, so 18 MiB are to stay free:

    batch 8, checkpointing, engine with a share of 0.1   892 MiB   533 tokens/s
    batch 4, checkpointing, engine with either share     836 or 636 MiB   400 tokens/s
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autotune.core.answer import Recommendation
from autotune.core.headroom import NO_HEADROOM, Headroom, default_headroom
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.study import open_study
from tests.inline_executor import InlineExecutor
from tests.simulated import MIB, Machine, ToyTrainer, stored_toy_job, toy_job, toy_space

SMALL = {
    "num_generations": (8,),
    "max_completion_length": (64,),
    "batch": (4, 8),
    "checkpointing": (True,),
}


def recommended(
    folder: Path,
    headroom: Headroom,
    *,
    limit_mib: int = 900,
    **choices: tuple[object, ...],
) -> Recommendation:
    job = stored_toy_job(
        folder,
        toy_space(**{**SMALL, **choices}),
        limit_mib * MIB,
        headroom=headroom,
    )
    trainer = ToyTrainer()
    machine = Machine(limit_bytes=limit_mib * MIB)
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    return run_search(
        job,
        study=study,
        executor=InlineExecutor(measure=machine.measure),
        listener=lambda _: None,
        clock=Clock(600),
    )


def test_the_fastest_at_the_limit_gives_way_to_one_that_leaves_room(tmp_path: Path) -> None:
    at_the_limit = recommended(tmp_path, NO_HEADROOM)
    assert at_the_limit.winner is not None
    assert at_the_limit.winner.measurement.memory.peak_bytes == 892 * MIB

    (tmp_path / "study.db").unlink()
    with_room = recommended(tmp_path, default_headroom(900 * MIB))
    assert with_room.winner is not None
    assert with_room.winner.candidate.knobs["batch"] == 4
    assert with_room.winner.candidate.knobs["use_vllm"] is True
    for trial in (*with_room.runner_ups, with_room.certificate or with_room.winner):
        assert trial.verdict.margin_bytes is not None
        assert trial.verdict.margin_bytes >= 18 * MIB


def test_without_any_that_leaves_room_the_reason_names_the_flag(tmp_path: Path) -> None:
    """The only candidate needs 692 of 700 MiB, and 14 are to stay free."""
    only = {"batch": (8,), "checkpointing": (True,), "use_vllm": (False,)}
    answer = recommended(tmp_path, default_headroom(700 * MIB), limit_mib=700, **only)
    assert answer.winner is None
    assert "8 MiB would be left" in answer.trials[-1].verdict.why
    assert "--headroom 0" in answer.trials[-1].verdict.why


def test_a_candidate_whose_peaks_differ_more_than_it_leaves_is_refuted(tmp_path: Path) -> None:
    """Each candidate's longer runs reach 100 MiB more with varied lengths: 64 are left by 836."""
    machine = Machine(limit_bytes=900 * MIB)

    def measure(candidate: object, plan: object) -> object:
        measurement = machine.measure(candidate, plan)  # type: ignore[arg-type]
        if plan.varied_lengths and measurement.memory.peak_bytes:  # type: ignore[attr-defined]
            lowest = measurement.memory.peak_bytes - 100 * MIB
            memory = replace(measurement.memory, lowest_peak_bytes=lowest)
            measurement = replace(measurement, memory=memory)
        return measurement

    space = toy_space(**SMALL)
    job = toy_job(tmp_path, space, 900 * MIB, headroom=default_headroom(900 * MIB))
    trainer = ToyTrainer()
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    answer = run_search(
        job,
        study=study,
        executor=InlineExecutor(measure=measure),  # type: ignore[arg-type]
        listener=lambda _: None,
        clock=Clock(600),
    )
    certificate = answer.certificate
    assert certificate is not None and certificate.verdict.margin_bytes is not None
    assert certificate.verdict.margin_bytes >= 100 * MIB

"""Answers of the real search on a simulated machine, to report about; each is searched for once."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

from autotune.core.answer import Recommendation
from autotune.core.events import Event
from autotune.core.job import Job
from autotune.core.measurement import Outcome
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.study import open_study
from tests.inline_executor import InlineExecutor
from tests.simulated import MIB, Machine, ToyTrainer, toy_job, toy_space

_SCRATCH = tempfile.TemporaryDirectory(prefix="autotune-answers-")
"""Emptied when the tests end."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    job: Job
    answer: Recommendation
    machine: Machine
    events: tuple[Event, ...]


@functools.cache
def answered(limit_mib: int, *, everything_crashes: bool = False) -> Answered:
    """Return the answer of a search of the toy space under this limit."""
    folder = Path(tempfile.mkdtemp(dir=_SCRATCH.name))
    job = toy_job(folder, toy_space(num_generations=(8, 4)), limit_mib * MIB)
    trainer, events = ToyTrainer(), list[Event]()
    candidates = legal_candidates(job, trainer)
    outcomes = (
        {candidate.id: Outcome.CRASH for candidate in candidates} if everything_crashes else {}
    )
    machine = Machine(limit_bytes=limit_mib * MIB, outcomes=outcomes)
    study = open_study(job, candidates, baseline_candidate(job, trainer))
    executor = InlineExecutor(measure=machine.measure)
    answer = run_search(
        job,
        study=study,
        executor=executor,
        listener=events.append,
        clock=Clock(600),
    )
    return Answered(
        job=job,
        answer=answer,
        machine=machine,
        events=tuple(events),
    )

"""Answers of the real search on a simulated machine, to report about; each is searched for once."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

from autotune.events import Event
from autotune.executors.inline import InlineExecutor
from autotune.measurement import Outcome
from autotune.question import Question
from autotune.recommendation import Recommendation
from autotune.study import open_study
from autotune.tune import Clock, baseline_candidate, legal_candidates, tune
from tests.simulated import MIB, Machine, ToyTrainer, toy_question, toy_space

_SCRATCH = tempfile.TemporaryDirectory(prefix="autotune-answers-")
"""Emptied when the tests end."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    question: Question
    answer: Recommendation
    machine: Machine
    events: tuple[Event, ...]


@functools.cache
def answered(limit_mib: int, *, everything_crashes: bool = False) -> Answered:
    """What a whole search of the toy space finds under this limit."""
    folder = Path(tempfile.mkdtemp(dir=_SCRATCH.name))
    question = toy_question(folder, toy_space(num_generations=(8, 4)), limit_mib * MIB)
    trainer, events = ToyTrainer(), list[Event]()
    candidates = legal_candidates(question, trainer)
    outcomes = {candidate.id: Outcome.CRASH for candidate in candidates} if everything_crashes else {}
    machine = Machine(limit_bytes=limit_mib * MIB, outcomes=outcomes)
    study = open_study(question, candidates, baseline_candidate(question, trainer))
    executor = InlineExecutor(measure=machine.measure)
    answer = tune(question, study=study, executor=executor, listener=events.append, clock=Clock(600))
    return Answered(question=question, answer=answer, machine=machine, events=tuple(events))

"""Predicting counts in the budget and ends with its share: the rest is measured without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autotune.catalog.space_files import load_space
from autotune.core.events import Event
from autotune.core.job import Job, Model, Task, Workload
from autotune.core.space import Candidate
from autotune.frameworks.trl.trainers import TrlGrpo
from autotune.machine.hardware_detection import hardware
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.pipeline import _Searcher
from autotune.search.study import open_study
from tests.inline_executor import InlineExecutor
from tests.prediction import hanging_trace
from tests.prediction.test_service import CONFIG
from tests.simulated import MIB, Machine, Oracle, ToyTrainer, note_text, toy_job, toy_space

pytestmark = pytest.mark.timeout(120)  # the step that is traced takes 600 s


class Hanging(TrlGrpo):
    """GRPO, whose steps are not traced within any budget."""

    trace_adapter = str(hanging_trace.__file__)


class EqualCandidates(Machine):
    """Machine on which each candidate of any space fits and is as fast as the others."""

    def need(self, candidate: Candidate) -> int:
        return MIB

    def speed(self, candidate: Candidate) -> float:
        return 100.0


def traced_job(tmp_path: Path, budget_seconds: float) -> Job:
    """Return a job on a GPU, for a model of which no step model is shipped."""
    choices: dict[str, tuple[object, ...]] = {
        "use_vllm": (False,),
        "num_generations": (8,),
        "max_prompt_length": (64,),
        "max_completion_length": (64,),
    }
    model = Model(
        name="synthetic/model",
        config=CONFIG,
        folder=None,
        origin="made up",
    )
    workload = Workload(
        model=model,
        python=Path(sys.executable),
        global_batch=16,
    )
    gpu = hardware("A100-40G")
    return toy_job(
        tmp_path,
        load_space("grpo").with_choices(choices),  # type: ignore[arg-type]
        gpu.memory_bytes,
        task=Task(workload=workload, hardware=gpu),
        budget_seconds=budget_seconds,
        max_probes=2,
    )


def test_a_budget_ends_predictions_and_the_search_goes_on(tmp_path: Path) -> None:
    job = traced_job(tmp_path, budget_seconds=6.0)
    candidates = legal_candidates(job, Hanging())
    events: list[Event] = []
    machine = EqualCandidates(limit_bytes=job.memory_limit_bytes)
    searcher = _Searcher(
        trainer=Hanging(),
        executor=InlineExecutor(machine.measure),
        listener=events.append,
        clock=Clock(job.budget_seconds),
        versions={},
    )
    answer = searcher.run(job, candidates)
    assert "50% of the budget was spent on predictions, of 0 of" in note_text(events)
    assert answer.winner is not None


def test_candidates_without_a_prediction_can_win(tmp_path: Path) -> None:
    """Half of the candidates were predicted; the fastest is not among them."""
    machine = Machine(limit_bytes=4000 * MIB)
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes)
    candidates = legal_candidates(job, ToyTrainer())
    slow = [candidate for candidate in candidates if not candidate.knobs["use_vllm"]]
    answer = run_search(
        job,
        study=open_study(
            job,
            candidates,
            baseline_candidate(job, ToyTrainer()),
            Oracle(machine).screen(slow),
        ),
        executor=InlineExecutor(machine.measure),
        listener=lambda event: None,
        clock=Clock(job.budget_seconds),
    )
    assert answer.winner is not None
    assert machine.speed(answer.winner.candidate) == max(map(machine.speed, candidates))

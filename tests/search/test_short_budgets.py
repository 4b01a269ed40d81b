"""Budgets that pay for few probes: none is left unused that pays for one more and its
confirmation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from autotune.core.answer import Recommendation
from autotune.core.measurement import Measurement, ProbePlan
from autotune.core.space import Candidate
from autotune.search.confirmation import _has_time
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.study import open_study
from autotune.search.trial_view import TrialView
from tests.inline_executor import InlineExecutor
from tests.simulated import MIB, Machine, Oracle, ToyTrainer, toy_job, toy_space

LOAD_SECONDS = 60.0
TRAINED_TOKENS = 13_000.0  # of a short probe


@dataclass
class SlowMachine(Machine):
    """Machine on which loads and tokens take time: twice the seconds at half the speed."""

    now: float = 0.0
    live: str | None = None

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        load_seconds = 0.0 if candidate.load_key == self.live else LOAD_SECONDS
        self.live = candidate.load_key
        cycles = plan.warmup_cycles + plan.timed_cycles
        seconds = load_seconds + TRAINED_TOKENS / self.speed(candidate) * cycles / 4
        self.now += seconds
        measurement = super().measure(candidate, plan)
        cost = replace(measurement.cost, total_seconds=seconds, load_seconds=load_seconds)
        return replace(measurement, cost=cost)


def search(
    tmp_path: Path,
    machine: SlowMachine,
    budget_seconds: float,
    max_probes: int = 100,
) -> tuple[Recommendation, TrialView]:
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes, max_probes=max_probes)
    candidates = legal_candidates(job, ToyTrainer())
    baseline = baseline_candidate(job, ToyTrainer())
    predictions = Oracle(machine, off=0.05).screen(candidates)
    study = open_study(job, candidates, baseline, predictions)
    answer = run_search(
        job,
        study=study,
        executor=InlineExecutor(measure=machine.measure),
        listener=lambda event: None,
        clock=Clock(budget_seconds, now=lambda: machine.now),
    )
    return answer, study.view


def test_a_budget_is_not_spent_while_it_pays_for_a_probe_and_its_confirmation(
    tmp_path: Path,
) -> None:
    """The baseline takes 49 s and its load 60 s. The fastest candidate, with an engine, takes
    20 s, its load 60 s, and its confirmation 30 s: 219 s together.
    """
    machine = SlowMachine(limit_bytes=4000 * MIB)
    answer, _ = search(tmp_path, machine, budget_seconds=240.0)
    assert answer.winner is not None and answer.winner.candidate.knobs["use_vllm"] is True
    assert answer.certificate is not None
    assert machine.now <= 240.0


def test_no_probe_is_started_whose_confirmation_would_be_cut_off(tmp_path: Path) -> None:
    """After the baseline 21 s are left: no engine can be loaded in them."""
    machine = SlowMachine(limit_bytes=4000 * MIB)
    answer, _ = search(tmp_path, machine, budget_seconds=130.0)
    assert answer.proven == "budget spent"
    assert [candidate.knobs["use_vllm"] for candidate, _ in machine.asked] == [False, False]


def test_a_confirmation_takes_one_load_and_two_probes(tmp_path: Path) -> None:
    """60 s and twice 49 s, not twice the load as well."""
    machine = SlowMachine(limit_bytes=4000 * MIB)
    _, view = search(tmp_path, machine, budget_seconds=1000.0, max_probes=1)
    assert not _has_time(view, 155.0)
    assert _has_time(view, 160.0)

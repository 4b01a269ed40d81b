"""Scripts of somebody who knows Optuna: `create_study` and `optimize` with our classes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import optuna
import pytest
from optuna.trial import TrialState

from autotune.core.measurement import Measurement, ProbePlan
from autotune.core.space import Candidate
from autotune.search.objective import Probe
from autotune.search.parameters import ABSENT_VALUE
from autotune.search.pruning import SlowProbePruner
from autotune.search.sampler import PredictedSampler, StopAtEnd
from autotune.search.trial_storage import MEMORY
from tests.inline_executor import InlineExecutor
from tests.search.test_optuna_sampler import toy_sampler
from tests.simulated import MIB, Machine, toy_job, toy_space

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 900 * MIB


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples/optuna_study.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fastest_that_fits(machine: Machine, sampler: PredictedSampler) -> float:
    speeds = []
    for candidate in sampler.parameters.candidates:
        knobs = candidate.knobs
        is_preferred = knobs["num_generations"] == 8 and knobs["max_completion_length"] == 64
        if is_preferred and machine.need(candidate) <= machine.limit_bytes:
            speeds.append(machine.speed(candidate))
    return max(speeds)


@pytest.mark.parametrize("slots", [1, 3])
def test_the_example_finds_the_fastest_and_its_study_serves_all_of_optuna(
    tmp_path: Path, slots: int
) -> None:
    machine = Machine(limit_bytes=LIMIT)
    sampler = toy_sampler(tmp_path)
    job = toy_job(tmp_path, toy_space(), LIMIT)
    probe = Probe(job, sampler, InlineExecutor(machine.measure, slots=slots))
    storage = f"sqlite:///{tmp_path}/study.db"
    study = example().optimize(sampler, probe, storage)
    probe.close()

    assert study.best_value == pytest.approx(fastest_that_fits(machine, sampler), abs=1)
    assert len(study.trials) < 30
    assert max(Counter(machine.short_probes()).values()) == 1, "measured twice"
    assert any(trial.params["share"] == ABSENT_VALUE for trial in study.trials)
    for trial in study.trials:
        if trial.constraints:
            fits = max(trial.constraints.values()) <= 0
            assert fits or trial.state is TrialState.PRUNED
    example().write_figures(study, tmp_path / "figures")
    assert len(list((tmp_path / "figures").glob("*.html"))) == 4
    importances = optuna.importance.get_param_importances(study)
    assert set(importances) == set(sampler.parameters.distributions)


def test_a_study_goes_on_in_another_process_without_repeating(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    machine = Machine(limit_bytes=LIMIT)
    job = toy_job(tmp_path, toy_space(), LIMIT)

    def interrupted(candidate: Candidate, plan: ProbePlan) -> Measurement:
        if len(machine.asked) == 4:
            raise KeyboardInterrupt
        return machine.measure(candidate, plan)

    sampler = toy_sampler(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        example().optimize(sampler, Probe(job, sampler, InlineExecutor(interrupted)), storage)
    again = toy_sampler(tmp_path)
    study = example().optimize(again, Probe(job, again, InlineExecutor(machine.measure)), storage)
    assert study.best_value == pytest.approx(fastest_that_fits(machine, again), abs=1)
    assert max(Counter(machine.short_probes()).values()) == 1


@pytest.mark.slow
def test_a_trial_of_a_killed_process_holds_nothing_up(tmp_path: Path) -> None:
    """It stays RUNNING in a plain storage of Optuna, which has no heartbeat."""
    storage = f"sqlite:///{tmp_path}/study.db"
    machine = Machine(limit_bytes=LIMIT)
    job = toy_job(tmp_path, toy_space(), LIMIT)
    killed = toy_sampler(tmp_path)
    script = f"""
import os, optuna, pathlib
from tests.search.test_optuna_sampler import toy_sampler
sampler = toy_sampler(pathlib.Path({str(tmp_path)!r}))
study = optuna.create_study(study_name="grpo", storage={storage!r}, direction="maximize",
                            sampler=sampler)
sampler.suggest(study.ask())
os._exit(9)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert done.returncode == 9
    sampler = killed
    study = example().optimize(
        sampler, Probe(job, sampler, InlineExecutor(machine.measure)), storage
    )
    assert study.trials[0].state is TrialState.RUNNING
    assert study.best_value == pytest.approx(fastest_that_fits(machine, sampler), abs=1)


def test_an_objective_of_ones_own_needs_only_values_and_constraints(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=LIMIT)
    sampler = toy_sampler(tmp_path)
    stopped = []

    def objective(trial: optuna.Trial) -> float:
        candidate = sampler.suggest(trial)
        trial.set_constraint(MEMORY, machine.need(candidate) / LIMIT - 1)
        if machine.need(candidate) > LIMIT:
            raise optuna.TrialPruned("out of memory")
        for cycle in range(3):
            trial.report(machine.speed(candidate), step=cycle)
            if trial.should_prune():
                stopped.append((machine.speed(candidate), cycle))
                raise optuna.TrialPruned("slow")
        return machine.speed(candidate)

    study = optuna.create_study(
        direction="maximize",
        sampler=sampler,
        pruner=SlowProbePruner(sampler),
    )
    study.optimize(objective, n_trials=60, callbacks=[StopAtEnd(sampler)])
    assert study.best_value == pytest.approx(fastest_that_fits(machine, sampler))
    assert len(study.trials) < 60
    for speed, _ in stopped:
        assert speed < 0.95 * study.best_value


def test_the_pruner_decides_as_the_worker_does(tmp_path: Path) -> None:
    """The best of the tier has 100 tokens/s. A probe ends once 95 are out of reach: after one cycle
    only if it is far slower.
    """
    sampler = toy_sampler(tmp_path)
    pruner = SlowProbePruner(sampler)
    study = optuna.create_study(
        direction="maximize",
        sampler=sampler,
        pruner=pruner,
    )
    same_tier = []
    for candidate in sampler.parameters.candidates:
        knobs = candidate.knobs
        if knobs["num_generations"] == 8 and knobs["max_completion_length"] == 64:
            same_tier.append(candidate)

    def trial_of(
        candidate: Candidate,
        rates: list[float],
        state: TrialState,
    ) -> None:
        study.add_trial(
            optuna.trial.create_trial(
                state=state,
                params=sampler.parameters.of(candidate),
                distributions=sampler.parameters.distributions,
                intermediate_values=dict(enumerate(rates)),
                value=rates[0] if state is TrialState.COMPLETE else None,
            )
        )

    trial_of(same_tier[0], [100.0] * 3, TrialState.COMPLETE)

    def is_pruned(*rates: float) -> bool:
        trial_of(same_tier[1], list(rates), TrialState.RUNNING)
        return pruner.prune(study, study.trials[-1])

    assert not is_pruned(94.0)
    assert not is_pruned(94.0, 94.0)
    assert is_pruned(60.0, 60.0)
    assert is_pruned(40.0)
    assert not is_pruned(60.0)

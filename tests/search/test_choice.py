"""Choice of the recommendation: no gain within the noise, none from one probe, and the simplest
of equals.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from autotune.catalog import complexity, criteria
from autotune.core.answer import Recommendation
from autotune.core.job import Job
from autotune.core.measurement import Failure, Measurement, Outcome, ProbePlan
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate, Knob, SearchSpace
from autotune.search.agenda import RemainingBudget
from autotune.search.conclusion import conclude
from autotune.search.forecast_search import forecast
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.study import TrialRequest, open_study
from tests.inline_executor import InlineExecutor
from tests.simulated import MIB, Machine, Oracle, ToyTrainer, toy_job, toy_space

TRAINER = ToyTrainer()


@dataclass
class Noisy(Machine):
    """Machine on which a whole run is off by chance, and gains are small or none."""

    gains: Mapping[str, float] = field(default_factory=dict)
    """Speed by sharding, as a multiple."""

    noise: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def speed(self, candidate: Candidate) -> float:
        return 1000 * self.gains.get(str(candidate.knobs.get("sharding")), 1.0)

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        measurement = super().measure(candidate, plan)
        if measurement.worst is None:
            return measurement
        run = math.exp(self.dice.gauss(0, self.noise))
        cycles = tuple(
            run * math.exp(self.dice.gauss(0, self.noise / 2))
            for _ in measurement.worst.cycle_seconds
        )
        return replace(measurement, worst=replace(measurement.worst, cycle_seconds=cycles))


class Sharded(ToyTrainer):
    """Trainer whose baseline is the first of a space with a single moving knob."""

    def baseline(  # type: ignore[override]
        self, space: SearchSpace, task: object
    ) -> dict[str, object]:
        return dict(next(space.assignments()))


def _space(*sharding: str) -> SearchSpace:
    space = toy_space(
        batch=(1,),
        checkpointing=(True,),
        use_vllm=(False,),
        num_generations=(8,),
        max_completion_length=(64,),
    )
    knob = Knob(
        name="sharding",
        choices=sharding,
        effect="neutral",
        memory="unclear",
        says="spread over the GPUs",
    )
    return replace(space, knobs=(knob, *space.knobs))


def _search(
    job: Job,
    machine: Machine,
    *,
    predictions: Mapping[str, Prediction] | None = None,
) -> Recommendation:
    trainer = Sharded()
    study = open_study(
        job, legal_candidates(job, trainer), baseline_candidate(job, trainer), predictions or {}
    )
    executor = InlineExecutor(machine.measure)
    return run_search(
        job,
        study=study,
        executor=executor,
        listener=lambda event: None,
        clock=Clock(600.0),
    )


def test_a_gain_within_the_noise_keeps_the_baseline(tmp_path: Path) -> None:
    """The fastest of three equal rivals is mistaken for a gain no more often than once in ten."""
    job = toy_job(tmp_path, _space("zero2", "ddp", "zero3", "none"), 900 * MIB, storage="memory://")
    machines = []
    for seed in range(20):
        machines.append(
            Noisy(
                limit_bytes=900 * MIB,
                noise=0.05,
                dice=random.Random(seed),
            )
        )
    answers = [_search(job, machine) for machine in machines]
    keeping = []
    for answer in answers:
        if (
            answer.winner
            and answer.baseline
            and answer.winner.candidate == answer.baseline.candidate
        ):
            keeping.append(answer)
    assert len(keeping) >= 18
    for answer in keeping:
        assert (
            not answer.changes and answer.advantage is None
        ) or answer.advantage.why == "within the noise"
        assert answer.certificate is not None, (
            "the baseline is confirmed like any other recommendation"
        )


def test_a_gain_beyond_the_noise_is_recommended_with_its_interval(tmp_path: Path) -> None:
    job = toy_job(tmp_path, _space("zero2", "ddp"), 900 * MIB, storage="memory://")
    answer = _search(
        job,
        Noisy(
            limit_bytes=900 * MIB,
            noise=0.02,
            gains={"ddp": 1.5},
        ),
    )
    assert answer.winner is not None
    assert answer.winner.candidate.knobs["sharding"] == "ddp"
    assert answer.advantage is not None
    assert answer.advantage.why == "measurably faster"
    assert 1.0 < answer.advantage.low < 1.5 < answer.advantage.high


def test_without_a_confirmation_the_baseline_is_kept(tmp_path: Path) -> None:
    job = toy_job(tmp_path, _space("zero2", "ddp"), 900 * MIB, storage="memory://")
    machine = Noisy(limit_bytes=900 * MIB, gains={"ddp": 1.5})
    study = open_study(job, legal_candidates(job, Sharded()), baseline_candidate(job, Sharded()))
    for _ in range(2):
        request = study.ask(RemainingBudget(seconds=600.0, probes=100))
        assert isinstance(request, TrialRequest)
        assert request.purpose != "confirm"
        study.tell(request, machine.measure(request.candidate, ProbePlan()))
    ended, interrupted = (
        conclude(
            study.view,
            job,
            proven=why,
            loads=1,
            elapsed_seconds=1.0,
        )
        for why in ("budget spent", None)
    )  # type: ignore[arg-type]
    assert ended.winner is not None
    assert ended.winner.candidate.knobs["sharding"] == "zero2"
    assert ended.advantage is not None
    assert ended.advantage.why == "not confirmed"
    assert (
        interrupted.winner is not None and interrupted.winner.candidate.knobs["sharding"] == "ddp"
    ), "the best so far"
    assert interrupted.proven == "interrupted"


def test_of_equally_fast_confirmed_candidates_the_simplest_is_taken(tmp_path: Path) -> None:
    job = toy_job(tmp_path, _space("fsdp2", "zero3", "ddp"), 900 * MIB, storage="memory://")
    gains = {"fsdp2": 0.5, "zero3": 1.005, "ddp": 1.0}
    for seed in (0, 1, 4):  # in which chance does not tell them apart
        answer = _search(
            job,
            Noisy(
                limit_bytes=900 * MIB,
                noise=0.01,
                gains=gains,
                dice=random.Random(seed),
            ),
        )
        assert answer.winner is not None
        assert answer.winner.candidate.knobs["sharding"] == "ddp"


def test_of_candidates_predicted_equally_fast_the_simplest_is_taken(tmp_path: Path) -> None:
    job = toy_job(tmp_path, _space("fsdp2", "zero3", "ddp"), 900 * MIB)
    machine = Noisy(limit_bytes=900 * MIB, gains={"fsdp2": 0.5, "zero3": 1.02})
    answer = forecast(
        job,
        Oracle(machine=machine),
        legal_candidates(job, Sharded()),
        baseline_candidate(job, Sharded()),
    )
    assert answer.winner is not None
    assert answer.winner.candidate.knobs["sharding"] == "ddp"


@pytest.mark.parametrize(("gain", "sharding"), [(1.03, "zero3"), (1.2, "ddp")])
def test_on_emulated_cards_a_gain_must_exceed_what_predictions_resolve(
    gain: float,
    sharding: str,
    tmp_path: Path,
) -> None:
    class Emulated(Noisy):
        def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
            return replace(super().measure(candidate, plan), emulated=True)

    job = toy_job(tmp_path, _space("zero3", "ddp"), 900 * MIB, storage="memory://")
    machine = Emulated(limit_bytes=900 * MIB, gains={"ddp": gain})
    predictions = Oracle(machine=machine).screen(legal_candidates(job, Sharded()))
    answer = _search(job, machine, predictions=predictions)
    assert answer.winner is not None
    assert answer.winner.candidate.knobs["sharding"] == sharding


def test_the_order_of_simplicity_is_strategy_offload_checkpointing_and_the_number_of_changes() -> (
    None
):
    assert [criterion.criterion for criterion in criteria()] == [
        "strategy",
        "offload",
        "checkpointing",
    ]

    def candidate(**settings: object) -> Candidate:
        return Candidate(
            knobs=settings,
            settings=settings,
            load={},
        )  # type: ignore[arg-type]

    ordered = [
        candidate(sharding="ddp"),
        candidate(sharding="ddp", batch=2),
        candidate(sharding="ddp", gradient_checkpointing=True),
        candidate(sharding="ddp", offload_optimizer_device="cpu"),
        candidate(sharding="zero2"),
        candidate(sharding="zero3"),
    ]
    keys = [complexity(candidate, ordered[0]) for candidate in ordered]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def _failing(
    evidence: str,
    *,
    cause: str | None = None,
    excerpt: str = "",
) -> Failure:
    return Failure(
        evidence=evidence,
        cause=cause,
        phase="load",
        excerpt=excerpt,
    )


@dataclass
class Crashing(Machine):
    """Machine on which candidates crash; those with an engine run out of memory."""

    failure: Failure = field(default_factory=lambda: _failing("RuntimeError: broken"))
    without_engine_only: bool = False
    number: int = 0

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        measurement = super().measure(candidate, plan)
        self.number += 1
        if self.without_engine_only and candidate.knobs["use_vllm"]:
            return measurement
        failure = replace(
            self.failure, evidence=self.failure.evidence.replace("PID", str(self.number))
        )
        return replace(
            measurement,
            outcome=Outcome.CRASH,
            worst=None,
            failure=failure,
        )


def _crashes(folder: Path, machine: Machine, **choices: tuple[object, ...]) -> Recommendation:
    job = toy_job(folder, toy_space(**choices), machine.limit_bytes, storage="memory://")
    study = open_study(job, legal_candidates(job, TRAINER), baseline_candidate(job, TRAINER))
    return run_search(
        job,
        study=study,
        executor=InlineExecutor(machine.measure),
        listener=lambda event: None,
        clock=Clock(600.0),
    )


def test_an_import_error_that_no_candidate_avoids_ends_the_search_at_once(tmp_path: Path) -> None:
    failure = _failing("ModuleNotFoundError: No module named 'math_verify'", cause="version")
    answer = _crashes(tmp_path, Crashing(limit_bytes=900 * MIB, failure=failure))
    assert answer.counts.probed == 1
    assert answer.proven == "not proven infeasible"


def test_an_import_error_of_an_optional_package_does_not(tmp_path: Path) -> None:
    failure = _failing("ModuleNotFoundError: No module named 'bitsandbytes'", cause="version")
    assert _crashes(tmp_path, Crashing(limit_bytes=900 * MIB, failure=failure)).counts.probed == 3


def test_crashes_that_differ_in_a_process_number_are_alike(tmp_path: Path) -> None:
    failure = _failing("RuntimeError: worker PID at 0x7fPID ended")
    assert _crashes(tmp_path, Crashing(limit_bytes=900 * MIB, failure=failure)).counts.probed == 3


def test_a_crash_is_no_reason_to_go_on_to_a_less_preferred_tier(tmp_path: Path) -> None:
    """Two candidates of the first tier crash, differently: whether they fit is not known."""
    failure = _failing("RuntimeError: PIDa")
    machine = Crashing(
        limit_bytes=150 * MIB,
        failure=failure,
        without_engine_only=True,
    )
    answer = _crashes(tmp_path, machine, batch=(1,), checkpointing=(True,))
    assert answer.winner is None
    assert answer.trials
    for trial in answer.trials:
        assert trial.candidate.knobs["num_generations"] == 8
        assert trial.candidate.knobs["max_completion_length"] == 64

"""Contract of every executor, inline or in processes of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.core.errors import ProbeError
from autotune.core.measurement import Cost, Measurement, Memory, Outcome, ProbePlan, Speed
from autotune.core.space import Candidate
from autotune.probe.executors.base import Executor, ProbeRunner
from autotune.probe.executors.local_places import SlotPlace
from tests.executors.measuring import hold, measured, phase, sleep
from tests.inline_executor import InlineExecutor
from tests.probe.toys import executor, plan, toy

ONE = toy(phase("rollout"), sleep(0.01))
SAME_LOAD = toy(phase("backward"), sleep(0.01))
OTHER_LOAD = toy(load=(hold(2),))
LONG = toy(phase("backward"), sleep(50))
TOO_LARGE = toy(phase("backward"), hold(300))


def simulate(candidate: Candidate, probe: ProbePlan) -> Measurement:
    """The same facts by arithmetic."""
    fits = candidate != TOO_LARGE
    speed = Speed(
        completion_tokens=32,
        cycle_seconds=(0.5,),
        cycle_loss_tokens=(100,),
        prompt_tokens=7,
        phase_seconds={"rollout": 0.4, "other": 0.1},
    )
    return Measurement(
        candidate_id=candidate.id,
        outcome=Outcome.OK if fits else Outcome.OOM_BACKWARD,
        memory=Memory(
            peak_bytes=2**20,
            limit_bytes=2**28,
            bound_by="simulated",
        ),
        cost=Cost(total_seconds=0.5, load_seconds=0.0),
        worst=speed if fits else None,
    )


@pytest.fixture(
    params=[
        "inline",
        "local",
        pytest.param("ray", marks=pytest.mark.slow),
        "inline x2",
        "local x2",
    ],
    ids=lambda name: str(name),
)
def any_executor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Executor]:
    probe_executor: Executor = _MADE[request.param](tmp_path, request)
    yield probe_executor
    probe_executor.close()


def _on_ray(tmp_path: Path, request: pytest.FixtureRequest) -> Executor:
    from tests.executors.clusters import ray_executor

    return ray_executor(request.getfixturevalue("two_nodes").address, tmp_path, slots=2)


_MADE: dict[str, Callable[[Path, pytest.FixtureRequest], Executor]] = {
    "inline": lambda folder, request: InlineExecutor(simulate),
    "inline x2": lambda folder, request: InlineExecutor(simulate, slots=2),
    "local": lambda folder, request: executor(folder),
    "local x2": lambda folder, request: executor(
        folder, places=(SlotPlace(label="first"), SlotPlace(label="second"))
    ),
    "ray": _on_ray,
}


def test_slots_are_numbered_from_zero_with_their_hosts(any_executor: Executor) -> None:
    any_executor.prepare()
    assert [slot.number for slot in any_executor.slots] == list(range(len(any_executor.slots)))
    assert any_executor.slots and all(slot.hosts and slot.label for slot in any_executor.slots)


def test_every_slot_has_its_own_runner(any_executor: Executor) -> None:
    any_executor.prepare()
    for slot in any_executor.slots:
        assert measured(any_executor, ONE, slot=slot.number).outcome is Outcome.OK
        assert any_executor.loads == slot.number + 1
    for slot in any_executor.slots:
        measured(any_executor, SAME_LOAD, slot=slot.number)
    assert any_executor.loads == len(any_executor.slots)


def test_interrupted_probe_ends_at_once_and_close_restores(any_executor: Executor) -> None:
    measured(any_executor, ONE)
    if isinstance(any_executor, InlineExecutor):
        return  # a function can't be interrupted
    outcomes: list[object] = []

    def measure() -> None:
        try:
            outcomes.append(measured(any_executor, LONG, 60))
        except ProbeError as error:
            outcomes.append(error)

    thread = threading.Thread(target=measure)
    thread.start()
    time.sleep(1.0)
    began = time.monotonic()
    any_executor.interrupt()
    thread.join(20)
    assert time.monotonic() - began < 15
    assert len(outcomes) == 1 and isinstance(outcomes[0], ProbeError)
    any_executor.close()
    assert measured(any_executor, ONE).outcome is Outcome.OK


def test_one_load_serves_every_candidate_of_its_key(any_executor: Executor) -> None:
    first = any_executor.open(ONE)
    first.measure(ONE, plan())
    second = any_executor.open(SAME_LOAD)
    second.measure(SAME_LOAD, plan())
    assert first is second
    assert any_executor.loads == 1


def test_another_load_key_loads_again(any_executor: Executor) -> None:
    for candidate in (ONE, OTHER_LOAD, ONE):
        measured(any_executor, candidate)
    assert any_executor.loads == 3


def test_nothing_is_loaded_before_the_first_measure(any_executor: Executor) -> None:
    runner: ProbeRunner = any_executor.open(ONE)
    assert runner.load_key == ONE.load_key
    assert any_executor.loads == 0


def test_a_measurement_is_about_its_candidate(any_executor: Executor) -> None:
    measurement = measured(any_executor, ONE)
    assert measurement.candidate_id == ONE.id
    assert measurement.outcome is Outcome.OK
    assert measurement.worst is not None
    assert measurement.worst.tokens_per_second > 0
    assert sum(measurement.worst.phase_seconds.values()) == pytest.approx(
        sum(measurement.worst.cycle_seconds)
    )
    assert measurement.memory.bound_by
    assert measurement.cost.total_seconds >= measurement.cost.load_seconds


def test_a_candidate_that_does_not_fit_is_a_measurement_and_the_next_one_runs(
    any_executor: Executor,
) -> None:
    failed = measured(any_executor, TOO_LARGE)
    assert failed.outcome is Outcome.OOM_BACKWARD
    assert failed.worst is None
    assert measured(any_executor, ONE).outcome is Outcome.OK


def test_runner_refuses_a_candidate_of_another_load(any_executor: Executor) -> None:
    with pytest.raises(ProbeError, match=OTHER_LOAD.load_key):
        any_executor.open(ONE).measure(OTHER_LOAD, plan())


def test_closing_twice_is_harmless_and_opening_again_works(any_executor: Executor) -> None:
    runner = any_executor.open(ONE)
    runner.measure(ONE, plan())
    runner.close()
    runner.close()
    any_executor.close()
    any_executor.close()
    assert measured(any_executor, ONE).outcome is Outcome.OK
    assert any_executor.loads == 2

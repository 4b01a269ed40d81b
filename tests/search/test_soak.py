"""The winner is soaked; where it does not hold, the next finalist is, and takes its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.core.events import Event
from autotune.core.measurement import CycleMemory, LoopActivity, Measurement, Outcome, ProbePlan
from autotune.core.space import Candidate
from autotune.core.units import MIB
from autotune.search.soak import soak
from tests.inline_executor import InlineExecutor
from tests.report.answers import Answered, answered
from tests.simulated import note_text

CASE = answered(900)


class Soaker:
    """The simulated machine, whose chosen candidates leak memory when they run for long."""

    def __init__(
        self,
        case: Answered,
        leaking: set[str],
        per_cycle: int,
    ) -> None:
        self._case, self._leaking, self._per_cycle = case, leaking, per_cycle
        self.soaked: list[str] = []

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        assert plan.soak_seconds == 20
        assert plan.deadline_seconds > plan.soak_seconds
        self.soaked.append(candidate.id)
        measured = self._case.machine.measure(candidate, replace(plan, soak_seconds=None))
        start = (measured.memory.peak_bytes or 0) - 200 * MIB
        leak = self._per_cycle if candidate.id in self._leaking else 0
        cycles = tuple(
            CycleMemory(
                steps=n + 1,
                seconds=n,
                peak_bytes=start + n * leak,
                held_bytes=start,
            )
            for n in range(30)
        )
        peak = max(cycle.peak_bytes for cycle in cycles)
        over = peak > measured.memory.limit_bytes
        return replace(
            measured,
            outcome=Outcome.OOM_BACKWARD if over else Outcome.OK,
            memory=replace(measured.memory, peak_bytes=peak),
            exercised=LoopActivity(
                optimizer_steps=30,
                generations=30,
                cycles=cycles,
                seconds=20,
            ),
        )


def run(leaking: set[str], per_cycle: int = 100 * MIB) -> tuple[Soaker, list[Event], object]:
    machine = Soaker(CASE, leaking, per_cycle)
    events = list[Event]()
    answer = soak(CASE.job, CASE.answer, InlineExecutor(machine.measure), events.append, 20)
    return machine, events, answer


def verdicts(answer: Any) -> list[str]:
    return [soak.verdict for soak in answer.soaks]


def test_a_winner_that_holds_stays() -> None:
    machine, _, answer = run(set())
    assert CASE.answer.winner is not None
    assert machine.soaked == [CASE.answer.winner.candidate.id]
    assert answer.winner == CASE.answer.winner  # type: ignore[attr-defined]
    assert verdicts(answer) == ["held"]


def test_the_next_finalist_takes_the_place_of_one_that_does_not_hold() -> None:
    first = CASE.answer.winner
    second = CASE.answer.runner_ups[0]
    assert first is not None
    machine, events, answer = run({first.candidate.id})
    assert machine.soaked == [first.candidate.id, second.candidate.id]
    assert answer.winner.candidate == second.candidate  # type: ignore[attr-defined]
    assert answer.certificate.candidate == second.candidate  # type: ignore[attr-defined]
    assert answer.refuted[-1].candidate == first.candidate  # type: ignore[attr-defined]
    assert verdicts(answer) == ["crossed", "held"]
    assert "does not hold" in note_text(events)


def test_where_none_holds_nothing_is_recommended() -> None:
    everyone = {trial.candidate.id for trial in CASE.answer.trials}
    machine, _, answer = run(everyone)
    assert 1 < len(machine.soaked) <= 3
    assert answer.winner is None  # type: ignore[attr-defined]
    assert set(verdicts(answer)) == {"crossed"}

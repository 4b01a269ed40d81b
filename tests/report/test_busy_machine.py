"""Repeats of one candidate that show that the machine did other work."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.answer import Recommendation, Trial
from autotune.report.answer_document import document
from autotune.report.busy_machine import busy_machine_text
from tests.report.answers import answered

CASE = answered(900)


def slowed(trial: Trial, factor: float) -> Trial:
    """Return the trial as if each cycle had taken `factor` times as long."""
    speed = trial.measurement.worst
    assert speed is not None
    cycles = tuple(factor * seconds for seconds in speed.cycle_seconds)
    worst = replace(speed, cycle_seconds=cycles)
    return replace(trial, measurement=replace(trial.measurement, worst=worst))


def with_repeat(factor: float, beside: int | None = None) -> Recommendation:
    """Return an answer with one candidate measured twice, `factor` times slower at last."""
    winner = CASE.answer.winner
    assert winner is not None
    repeat = slowed(winner, factor)
    repeat = replace(repeat, measurement=replace(repeat.measurement, beside=beside))
    return replace(CASE.answer, trials=(winner, repeat))


def test_repeats_that_agree_say_nothing() -> None:
    assert busy_machine_text(CASE.answer) is None
    assert busy_machine_text(with_repeat(1.49)) is None


def test_a_repeat_at_half_the_speed_is_said_first() -> None:
    answer = with_repeat(2.0)
    winner = CASE.answer.winner
    assert winner is not None
    assert winner.measurement.worst is not None
    rate = winner.measurement.worst.tokens_per_second
    sentence = busy_machine_text(answer)
    assert sentence is not None
    assert f"{rate:,.0f}, then {rate / 2:,.0f} tokens/s for the same candidate" in sentence
    assert document(CASE.job, answer, [])["busy_machine"] == sentence


def test_a_probe_among_others_is_no_repeat_of_one_alone() -> None:
    assert busy_machine_text(with_repeat(2.0, beside=3)) is None

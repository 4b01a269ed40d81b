"""The step model of one micro-step, from that of many, on a step worked out by hand."""

from __future__ import annotations

import typing
from dataclasses import replace

import pytest

from autotune.core.measurement import Phase
from autotune.core.trace import Mark, Trace
from autotune.estimate.screening import NotUniform, Point, StepModel, survey
from autotune.estimate.screening.fewer_micro_steps import with_fewer_micro_steps
from autotune.estimate.screening.step_model import steps_at
from tests.estimate.test_screening_example import step

POINTS = [Point(1, 8, 8, 4), Point(4, 8, 24, 5)]

WEIGHT, ACTIVATION, LIST = range(3)  # parts
# Allocations: 1 weight, 2 and 5 activations, 3 and 6 losses, 4 gradient, 7 a number that is logged,
# 8 a list of the optimizer
BEFORE = "1  2 3 4 -2 "
LAST_MICRO_STEP = " 5 6 -3 7 -5 "
OPTIMIZER = " 8 -8 -6 -7 -4"
MARKS = "load 0, forward 1, backward 3, forward 5, backward 8, optimizer 10"


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def two_micro_steps(point: Point) -> Trace:
    rows = point.micro_batch * (point.prompt + point.completion)
    activation_bytes = 2 * rows
    loss_bytes = 600 + point.micro_steps
    micro_step_bytes = (activation_bytes, loss_bytes)
    marks = []
    for text in MARKS.split(","):
        phase, event = text.split()
        mark = Mark(event=int(event), phase=typing.cast(Phase, phase), step=0)
        marks.append(mark)
    return replace(
        step(point, 1),
        sizes=(100, *micro_step_bytes, 700, *micro_step_bytes, 4, 40),
        parts=(WEIGHT, *[ACTIVATION] * 6, LIST),
        events=numbers(BEFORE + LAST_MICRO_STEP + OPTIMIZER),
        marks=tuple(marks),
    )


def model_of_many() -> StepModel:
    return survey(lambda point, _: two_micro_steps(point), POINTS, None)


def test_the_first_loss_lives_as_long_as_the_last_one_would() -> None:
    """Allocation 3, which the last micro-step frees, is freed where 6 is; the logged number goes;
    8 becomes 5.
    """
    shortened = with_fewer_micro_steps(model_of_many(), 1)
    assert shortened.trace.events == numbers("1  2 3 4 -2  5 -5 -3 -4")
    assert shortened.trace.sizes == numbers("100 32 604 700 40")
    assert shortened.trace.parts == numbers("0 1 1 1 2")


def test_marks_are_those_of_one_micro_step() -> None:
    shortened = with_fewer_micro_steps(model_of_many(), 1)
    marks = [f"{mark.phase} {mark.event}" for mark in shortened.trace.marks]
    assert ", ".join(marks) == "load 0, forward 1, backward 3, optimizer 5"


def test_training_is_half_the_work() -> None:
    many = model_of_many()
    shortened = with_fewer_micro_steps(many, 1)
    point = POINTS[0]
    [work_of_two] = steps_at(many, [point])
    [shortened_work] = steps_at(shortened, [point])
    factors = {"forward": 0.5, "optimizer": 1.0}
    for before, after in zip(work_of_two.work, shortened_work.work, strict=True):
        expected_bytes = factors[before.phase] * before.moved_bytes
        assert after.moved_bytes == pytest.approx(expected_bytes), before.phase


@pytest.mark.parametrize("micro_steps", [2, 3])
def test_two_and_three_are_as_many(micro_steps: int) -> None:
    many = model_of_many()
    assert with_fewer_micro_steps(many, micro_steps) is many


def test_what_nothing_replaces_is_freed_where_the_micro_step_was() -> None:
    """Without a loss that lives on, allocation 3 ends with the backward pass before."""
    many = model_of_many()
    events = numbers(BEFORE + " 5 6 -3 -6 -5 " + " 8 -8 -4")
    trace = replace(many.trace, events=events)
    stretched = replace(many.stretched, trace=trace)
    shortened = with_fewer_micro_steps(replace(many, stretched=stretched), 1)
    assert shortened.trace.events == numbers("1  2 3 4 -2 -3  5 -5 -4")


def test_a_large_allocation_of_the_last_micro_step_alone_is_refused() -> None:
    """Allocation 7 has 4 bytes there, and 600 here."""
    many = model_of_many()
    growth = many.stretched.growth.copy()
    growth[6] = 596
    stretched = replace(many.stretched, growth=growth)
    with pytest.raises(NotUniform):
        with_fewer_micro_steps(replace(many, stretched=stretched), 1)


def test_a_step_of_one_micro_step_has_none_to_leave_out() -> None:
    shortened = with_fewer_micro_steps(model_of_many(), 1)
    with pytest.raises(NotUniform):
        with_fewer_micro_steps(shortened, 1)

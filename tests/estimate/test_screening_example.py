"""The worked example of `autotune.estimate.screening`, step by step, with values found by hand."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from autotune.core.trace import Inventory, Mark, Part, Trace, Work
from autotune.estimate.screening import Point, StepModel, initial_traces, repetition_of, survey
from autotune.estimate.screening.blocks import BlockedTrace
from autotune.estimate.screening.pairing import NO_COUNTERPART, BlockCopy, Pairing
from autotune.estimate.screening.references import References
from autotune.estimate.screening.repetition import LayerRepetition
from autotune.estimate.screening.step_model import phase_peaks, sizes_at, steps_at

PARTS: tuple[Part, ...] = ("weights", "activations", "optimizer")
WEIGHTS, ACTIVATIONS, OPTIMIZER = range(len(PARTS))

LAYERS = 6
CONFIG = {"model_type": "synthetic", "num_hidden_layers": LAYERS}
REPETITION = LayerRepetition(
    layers=3,
    first=1,
    period=1,
    copies=3,
)
FIRST, SECOND = Point(1, 8, 8, 1), Point(4, 8, 24, 1)
BETWEEN = Point(2, 8, 16, 1)


def step(point: Point, layers: int) -> Trace:
    """Return T(layers, point)."""
    batch, length = point.micro_batch, point.prompt + point.completion
    hidden = 2 * batch * length
    weights = list(range(1, layers + 1))
    activations = list(range(layers + 1, 2 * layers + 1))
    optimizer_list = 2 * layers + 1
    events = [*weights, *activations, *(-number for number in reversed(activations))]
    events += [optimizer_list, -optimizer_list]

    marks = [
        Mark(
            event=0,
            phase="load",
            step=0,
        )
    ]
    for layer in range(layers):
        marks.append(
            Mark(
                event=layers + layer,
                phase="forward",
                step=0,
                layer=layer,
            )
        )
    for layer in range(layers):
        event = 2 * layers + layer
        marks.append(
            Mark(
                event=event,
                phase="backward",
                step=0,
                layer=layers - 1 - layer,
            )
        )
    marks.append(
        Mark(
            event=3 * layers,
            phase="optimizer",
            step=0,
        )
    )
    return Trace(
        basis="traced",
        versions={},
        device="cuda",
        layers=layers,
        sizes=(*[100] * layers, *[hidden] * layers, 8 * layers + 16),
        parts=(*[WEIGHTS] * layers, *[ACTIVATIONS] * layers, OPTIMIZER),
        part_names=PARTS,
        events=tuple(events),
        marks=tuple(marks),
        work=(
            Work(
                phase="forward",
                flops={"bfloat16": (10 * layers + 6) * batch * length},
                moved_bytes=100 * layers,
                kernels=5 * layers,
                in_layers={
                    "bfloat16": 10 * layers * batch * length,
                    "moved_bytes": 100 * layers,
                    "kernels": 5 * layers,
                },
            ),
            Work(
                phase="optimizer",
                flops={},
                moved_bytes=300 * layers,
                kernels=layers,
            ),
        ),
        inventory=Inventory(
            parameters=50 * layers,
            trainable_parameters=50 * layers,
            weight_bytes=100 * layers,
            trainable_bytes=100 * layers,
            layer_bytes=(100,) * layers,
            layer_trainable=(50,) * layers,
            largest_parameter=50,
        ),
    )


def surveyed() -> StepModel:
    return survey(lambda point, layers: step(point, layers or LAYERS), [FIRST, SECOND], REPETITION)


def test_three_layers_determine_the_model() -> None:
    assert repetition_of(CONFIG) == REPETITION
    assert step(FIRST, 3).events == (1, 2, 3, 4, 5, 6, -6, -5, -4, 7, -7)


def test_two_points_of_three_layers_and_two_traces_of_four_are_asked_for() -> None:
    assert initial_traces([FIRST, SECOND], REPETITION, None) == [
        (FIRST, 3),
        (SECOND, 3),
        (FIRST, 4),  # the longer model
        (SECOND, 4),  # the check: the largest of everything
    ]


def test_sizes_are_formulas_of_the_point() -> None:
    sizes = surveyed().sizes
    assert sizes.is_exact
    terms = [term.products[0][0] for term in sizes.basis.terms]
    formulas = []
    for row in sizes.formula_of:
        coefficients = zip(terms, sizes.coefficients[row], strict=True)
        formulas.append({axes: round(value, 9) for axes, value in coefficients if value})
    assert formulas == [{"": 100}] * 3 + [{"BS": 2}] * 3 + [{"": 40}]


def test_each_block_of_the_longer_model_repeats_one_of_the_short_model() -> None:
    pairing = Pairing(BlockedTrace(step(FIRST, 3)), BlockedTrace(step(FIRST, 4)), REPETITION)
    # Blocks 1 to 3 of the short model are its forward pass, 4 to 6 its backward pass.
    assert pairing.block_copies == [
        BlockCopy(0, 0),
        BlockCopy(1, 0),
        BlockCopy(2, 0),
        BlockCopy(2, 1),
        BlockCopy(3, 0),
        BlockCopy(4, 0),
        BlockCopy(5, 1),  # a backward pass comes to the higher instance first
        BlockCopy(5, 0),
        BlockCopy(6, 0),
        BlockCopy(7, 0),
    ]
    assert pairing.group_blocks == {2, 5}
    assert pairing.per_group == {0}
    assert pairing.counterparts == [NO_COUNTERPART, 0, 1, 2, 3, 4, 4, 5, 6]
    assert pairing.growth == [0] * 8 + [8]


def test_each_instance_frees_what_it_has_made() -> None:
    pairing = Pairing(BlockedTrace(step(FIRST, 3)), BlockedTrace(step(FIRST, 4)), REPETITION)
    # f(0) and f(1) of the backward pass of the group's layer, made in its forward pass.
    lower, upper = pairing.allocations_at(short_block=5, offset=0)
    assert (lower, upper) == (5, 6)
    assert pairing.address_of(lower) == (5, 0)
    assert pairing.address_of(upper) == (5, 1)
    addresses = References(pairing, REPETITION.copies).freed_by_layer(short_block=5, offset=0)
    assert addresses == [(5, instance) for instance in range(4)]


def test_the_full_trace_has_six_layers() -> None:
    model = surveyed()
    full = step(FIRST, LAYERS)
    # fmt: off
    assert model.trace.events == (
        1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, -12, -11, -10, -9, -8, -7, 13, -13,
    )
    # fmt: on
    assert model.trace.events == full.events and model.trace.marks == full.marks
    assert model.trace.sizes == (*[100] * 6, *[32] * 6, 64)
    assert model.trace.inventory == full.inventory
    # The short model's allocations; the weights of the three further layers have none.
    assert model.stretched.origin.tolist() == [-1, -1, -1, 0, 1, 2, 3, 4, 4, 4, 4, 5, 6]
    assert model.stretched.growth.tolist() == [100] * 3 + [0] * 9 + [24]


def test_the_step_at_another_point() -> None:
    model = surveyed()
    assert model.residual == 0
    sizes = sizes_at(model, BETWEEN)
    assert sizes.tolist() == [100] * 6 + [96] * 6 + [64]
    assert phase_peaks(model.trace, sizes) == {
        "load": 600,
        "forward": 1176,
        "backward": 1176,
        "optimizer": 664,
    }


def test_the_work_at_another_point() -> None:
    """Forward: w_in = 30 BS and w_out = 6 BS, so 2 * 30 * 48 + 6 * 48 = 3168 operations.

    The optimizer's work is counted outside the layers: a group adds 300 bytes and one kernel.
    """
    (between,) = steps_at(surveyed(), [BETWEEN])
    forward, optimizer = between.work
    assert round(forward.flops["bfloat16"], 6) == 3168
    assert (round(forward.moved_bytes, 6), forward.kernels) == (600, 30)
    assert (round(optimizer.moved_bytes, 6), optimizer.kernels) == (1800, 6)


def test_a_step_model_is_plain_data() -> None:
    """It consists of tuples, columns of numbers and dataclasses: it could be written to a file."""
    plain: list[Any] = [surveyed()]
    while plain:
        value = plain.pop()
        if is_dataclass(value):
            plain += [getattr(value, field.name) for field in fields(value)]
        elif isinstance(value, tuple):
            plain += value
        elif isinstance(value, dict):
            plain += [*value, *value.values()]
        elif isinstance(value, np.ndarray):
            assert value.dtype in (np.int64, np.float64)
        else:
            assert value is None or type(value) in (str, int, float, bool)

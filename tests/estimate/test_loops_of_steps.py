"""Loops whose length depends on the point: what is around them, and what their layers work."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.trace import Trace, Work
from autotune.estimate.screening import Point, repetition_of, survey
from autotune.estimate.screening.step_model import sizes_at, steps_at
from tests.estimate.synthetic import replay
from tests.estimate.test_step_model import SPACE, TraceWriter, step

LAYERS = 8
CONFIG = {"num_hidden_layers": LAYERS, "model_type": "synthetic"}
UNEQUAL_ROWS = Point(
    micro_batch=4,
    prompt=136,
    completion=264,
    micro_steps=4,
)


def collated(point: Point) -> Trace:
    """Return a step that collates its rows between two large allocations of the same part."""
    length = point.prompt + point.completion
    writer = TraceWriter()
    writer.enter("load", 0)
    writer.make(30_000_000, "weights")
    embedded = writer.make(21_000_000, "activations")
    rows = []
    for _ in range(point.micro_batch):
        padded = writer.make(9 * length, "activations")
        rows.append(writer.make(8 * length, "activations"))
        writer.drop(padded)
    writer.make(1_000_003, "activations")
    writer.drop(embedded)
    for number in (0, 1):
        writer.enter("forward", number)
        writer.drop(writer.make(500 * point.micro_batch * length, "logits"))
    writer.enter("optimizer", 1)
    writer.drop(*rows)
    return writer.trace(1)


def test_what_surrounds_a_loop_keeps_its_size() -> None:
    """A common scale of all activations would miss each, and change where later blocks lie."""
    model = survey(lambda point, _: collated(point), SPACE, None)
    for point in [*SPACE, UNEQUAL_ROWS]:
        sizes = sizes_at(model, point).tolist()
        for size in (21_000_000, 1_000_003):
            assert size in sizes


def joined(point: Point) -> Trace:
    """A step that joins its prompts, row by row, then its completions, and keeps both."""
    writer = TraceWriter()
    writer.enter("load", 0)
    writer.make(100_000, "weights")
    writer.enter("score", 0)
    joined_rows = []
    for length in (point.prompt, point.completion):
        rows = []
        for _ in range(2 * point.micro_batch):
            rows.append(writer.make(8 * length, "activations"))
        joined_rows.append(writer.make(2 * point.micro_batch * 8 * length, "inputs"))
        writer.drop(*rows)
    writer.enter("optimizer", 0)
    writer.drop(*joined_rows)
    return writer.trace(1)


def test_tensors_into_which_rows_are_joined_have_their_own_sizes() -> None:
    """They lie between and behind two loops. With one factor for both, 64 prompts of 2,056 tokens
    and as many completions of 1,968 were below 1 MiB each, where the longer one is above.
    """
    model = survey(lambda point, _: joined(point), SPACE, None)
    uneven = Point(
        micro_batch=7,
        prompt=2056,
        completion=264,
        micro_steps=4,
    )
    sizes = sizes_at(model, uneven).tolist()
    assert 2 * 7 * 8 * 2056 in sizes
    assert 2 * 7 * 8 * 264 in sizes


def test_rows_of_a_loop_stay_in_the_pool_of_small_blocks() -> None:
    """Sixteen rows of 200 kB are small blocks, in two segments of 2 MiB. Two rows scaled up to as
    many bytes would be large ones, in a segment of 20 MiB.
    """

    def looped(point: Point) -> Trace:
        writer = TraceWriter()
        writer.enter("load", 0)
        writer.make(100_000, "weights")
        writer.enter("score", 0)
        rows = [writer.make(200_000, "activations") for _ in range(2 * point.micro_batch)]
        writer.enter("optimizer", 0)
        writer.drop(*rows)
        return writer.trace(1)

    model = survey(lambda point, _: looped(point), SPACE, None)
    full = Point(
        micro_batch=8,
        prompt=256,
        completion=512,
        micro_steps=4,
    )
    traced = replay(looped(full))
    modelled = replay(replace(model.trace, sizes=tuple(sizes_at(model, full).tolist())))
    assert modelled.reserved_bytes == traced.reserved_bytes == 4 * 2**20


def test_layers_that_work_unequally_have_their_work_at_every_point() -> None:
    """The lowest layer passes no gradient on: 10 BS of the others' 30 BS, in 8 layers 220 BS."""

    def worked(point: Point, short: int | None) -> Trace:
        layers = short or LAYERS
        tokens = point.micro_batch * (point.prompt + point.completion)
        inside = 30.0 * tokens * layers - 20.0 * tokens
        work = Work(
            phase="backward",
            moved_bytes=0.0,
            kernels=0,
            flops={"bfloat16": inside},
            in_layers={"bfloat16": inside},
        )
        return replace(step(point, layers), work=(work,))

    model = survey(worked, SPACE, repetition_of(CONFIG))
    for step_at in steps_at(model, SPACE):
        tokens = step_at.point.micro_batch * (step_at.point.prompt + step_at.point.completion)
        (backward,) = step_at.work
        assert round(backward.flops["bfloat16"]) == 220 * tokens

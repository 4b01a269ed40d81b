"""Blocks of one stream are not another's, and what is given back on the gathering stream waits."""

from __future__ import annotations

from dataclasses import replace

from autotune.predict.allocator import CachingAllocator
from autotune.predict.replay import replay
from autotune.predict.streams import IN_FLIGHT, GatheringApart
from autotune.trace import Inventory, Mark, Trace
from autotune.units import MIB

NAMES = ("weights", "activations", "communication")


def trace(*events: tuple[int, int, str]) -> Trace:
    """(+1 or -1, number, part) with 20 MiB each."""
    numbers = sorted({number for _, number, _ in events})
    part = {number: NAMES.index(name) for _, number, name in events}
    return Trace(
        basis="traced",
        versions={},
        device="cuda",
        layers=1,
        sizes=(20 * MIB,) * len(numbers),
        parts=tuple(part[number] for number in numbers),
        part_names=NAMES,
        events=tuple(sign * (number + 1) for sign, number, _ in events),
        marks=(Mark(event=0, phase="forward", step=0),),
        work=(),
        inventory=Inventory(
            parameters=0, trainable_parameters=0, weight_bytes=0, trainable_bytes=0, layer_bytes=(), layer_trainable=(),
            largest_parameter=0,
        ),
    )  # fmt: skip


def test_a_block_given_back_on_one_stream_serves_only_that_stream() -> None:
    one = trace((1, 0, "activations"), (-1, 0, "activations"), (1, 1, "communication"))
    assert replay(one).reserved_bytes == 20 * MIB
    assert replay(replace(one, gathers_apart=True)).reserved_bytes == 40 * MIB


def test_gathered_buffers_wait_for_two_more() -> None:
    events = [event for number in range(6) for event in ((1, number, "communication"), (-1, number, "communication"))]
    one = trace(*events)
    found = replay(replace(one, gathers_apart=True))
    assert found.allocated_bytes == 20 * MIB, "what waits is not allocated"
    assert found.reserved_bytes == (IN_FLIGHT + 1) * 20 * MIB
    assert replay(one).reserved_bytes == 20 * MIB


def test_emptying_the_cache_waits_for_every_event() -> None:
    both = GatheringApart(trace((1, 0, "communication"), (-1, 0, "communication")))
    both.malloc(0, 20 * MIB)
    both.free(0)
    assert both.reserved == 20 * MIB and both.allocated == both.requested == 0
    both.empty_cache()
    assert both.reserved == 0


def test_the_device_is_shared() -> None:
    one = trace((1, 0, "activations"), (1, 1, "communication"))
    assert replay(replace(one, gathers_apart=True), capacity_bytes=30 * MIB).out_of_memory is not None
    assert replay(replace(one, gathers_apart=True), capacity_bytes=40 * MIB).out_of_memory is None


def test_without_communication_nothing_differs() -> None:
    one = trace((1, 0, "weights"), (1, 1, "activations"), (-1, 1, "activations"), (1, 2, "activations"))
    apart, plain = GatheringApart(one), CachingAllocator()
    for event in one.events:
        for allocator in (apart, plain):
            allocator.malloc(event - 1, 20 * MIB) if event > 0 else allocator.free(-event - 1)
    assert (apart.reserved, apart.allocated, apart.requested) == (plain.reserved, plain.allocated, plain.requested)

"""Context of a traced step by library, kind of generation and sharding, and the insertions that
it makes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.core.composition import Composition, EngineSettings
from autotune.core.trace import Trace
from autotune.core.units import MIB
from autotune.estimate.insertion import Insertion, inserted
from autotune.estimate.step_in_context import insertions, places_in
from autotune.estimate.trace_context import TraceContext, step_context
from autotune.estimate.weight_sync import receiving_failure
from tests.estimate.synthetic import Book, composition, hardware, situation, training

ENGINE = EngineSettings(
    utilization=0.3,
    max_model_length=1024,
    max_num_seqs=8,
    sleep=True,
)
MATRIX = 1536 * 8960
"""The largest matrix with an adapter."""


def around(
    composed: Composition, *, trace: Trace | None = None, on_cpu: bool = False, **settings: Any
) -> TraceContext:
    device = dataclasses.replace(hardware(), kind="cpu") if on_cpu else hardware()
    return step_context(
        situation(
            composition=composed,
            hardware=device,
            trace=trace or training(),
            settings=settings,
        )
    )


def sharded(kind: str, **changed: Any) -> Composition:
    return dataclasses.replace(composition(ranks=4, **changed), sharded_by=kind)


def synced(context: TraceContext) -> int:
    """Return the bytes that the weight sync holds at its peak."""
    return sum(size for _, size in context.sync)


def test_workspaces_depend_on_the_gpu() -> None:
    assert around(composition()).cublas_workspace_bytes == 8320 * 1024
    assert around(composition(), on_cpu=True).cublas_workspace_bytes == 0


def test_only_an_offloaded_engine_empties_the_cache() -> None:
    awake = dataclasses.replace(ENGINE, sleep=False)
    assert around(composition(engine=ENGINE, generation="engine")).empties_before_rollout
    assert not around(composition(engine=awake, generation="engine")).empties_before_rollout
    assert not around(composition()).empties_before_rollout


def test_adapters_are_merged_for_the_sync() -> None:
    assert (
        synced(
            around(
                composition(
                    engine=ENGINE,
                    generation="engine",
                    adapter_rank=16,
                )
            )
        )
        == 10 * MATRIX
    )
    assert synced(around(composition(engine=ENGINE, generation="engine"))) == 0
    assert synced(around(composition(adapter_rank=16))) == 0  # no engine


def test_the_largest_adapted_matrix_follows_from_its_adapter() -> None:
    """Ranks of 2 on matrices of 300 x 200 and 500 x 100 elements, in float32."""
    trace = training()
    book = Book()
    book.enter("load")
    sizes = [4 * 2 * elements for elements in (300, 200, 500, 100)]
    for size in sizes:
        book.make(size, "adapters")
    book.enter("forward")
    book.make(MIB, "activations")
    inventory = dataclasses.replace(
        trace.inventory, trainable_parameters=2 * 1100, trainable_bytes=sum(sizes)
    )
    colocated = composition(
        engine=ENGINE,
        generation="engine",
        adapter_rank=2,
    )
    assert (
        synced(around(colocated, trace=dataclasses.replace(book.trace(), inventory=inventory)))
        == 10 * 300 * 200
    )


def test_an_engine_in_the_trainers_process_makes_the_first_product() -> None:
    composed = composition(engine=ENGINE, generation="engine")
    context, places = around(composed), places_in(training())
    first, backward = (
        insertion for insertion in insertions(places, context) if "workspaces" in insertion.parts
    )
    assert (first.event, first.parts, first.sizes[0]) == (
        4,
        ("inputs", "workspaces"),
        4096 * 1536 * 2,
    )
    assert backward.event == places.multiplying[1]
    apart = dataclasses.replace(composed, engine=dataclasses.replace(ENGINE, apart=True))
    assert around(apart).engine_inputs_bytes is None


def test_an_engine_starts_before_weights_are_prepared_on_several_ranks() -> None:
    book = Book()
    book.enter("load")
    book.make(20 * MIB, "weights")
    broadcast = book.make(30 * MIB, "communication")
    book.drop(broadcast)
    book.enter("forward")
    book.make(MIB, "activations")
    assert places_in(book.trace()).prepared_event == 1
    assert not around(sharded("ddp", engine=ENGINE, generation="engine")).engine_starts_first
    assert around(
        sharded("fsdp2", engine=ENGINE, generation="engine")
    ).engine_starts_first  # the model is on the host


def test_zero_3_gathers_all_to_merge_and_otherwise_one_parameter() -> None:
    merging = synced(
        around(
            sharded(
                "zero3",
                engine=ENGINE,
                generation="engine",
                adapter_rank=16,
            )
        )
    )
    pushing = synced(around(sharded("zero3", engine=ENGINE, generation="engine")))
    assert merging == pytest.approx(10 * MATRIX + 100 * MIB, abs=8)
    assert pushing == pytest.approx(100 * MIB * 2 / 10, abs=2)


def test_an_adapter_alone_gathers_nothing_and_sync_parts_gather_a_part() -> None:
    merged = sharded(
        "zero3",
        engine=ENGINE,
        generation="engine",
        adapter_rank=16,
    )
    adapter_only = dataclasses.replace(merged, syncs_adapter_only=True)
    assert synced(around(adapter_only)) == 0
    base_once = around(dataclasses.replace(adapter_only, first_sync_is_whole=True))
    assert synced(base_once) == pytest.approx(10 * MATRIX + 100 * MIB, abs=8)
    assert sum(size for _, size in base_once.first_sync) == pytest.approx(
        100 * MIB, abs=8
    )  # sent, and still referenced
    parts = synced(around(dataclasses.replace(merged, sync_parts=5)))
    assert parts == pytest.approx(10 * MATRIX + 100 * MIB / 5, abs=64)


@pytest.mark.parametrize(
    ("gathers", "expected"),
    [
        # 50 Mi parameters in float32 on four ranks; the head is tied: named twice. The largest has
        # 10 Mi, a layer 20 Mi.
        ("parameter", 40 * MIB + 64 * MIB),
        ("layer", 80 * MIB),
        ("model", 200 * MIB),
        ("shards", 50 * MIB + 151936 * 1536 + 40 * MIB + 80 * MIB),
    ],
)
def test_what_is_held_while_weights_are_sent(gathers: Any, expected: int) -> None:
    plain = sharded("fsdp1", engine=ENGINE, generation="engine")
    wide = tuple(dataclasses.replace(resident, dtype="float32") for resident in plain.residents)
    sending = dataclasses.replace(
        plain,
        residents=wide,
        sync_gathers=gathers,
        sync_buffer_bytes=64 * MIB,
    )
    inventory = dataclasses.replace(
        training().inventory, parameters=50 * MIB, largest_parameter=10 * MIB
    )
    trace = dataclasses.replace(
        training(), inventory=inventory
    )  # of 100 MiB, 40 in each of two layers
    context = around(sending, trace=trace)
    assert context.sync == (("communication", pytest.approx(expected, abs=8)),)
    single_rank = synced(around(dataclasses.replace(sending, ranks=1), trace=trace))
    assert single_rank == 64 * MIB + (
        200 * MIB + 4 * 151936 * 1536 if gathers == "shards" else 0
    ), "nothing is gathered on one rank"


def test_weights_are_packed_into_two_buffers_that_exceed_their_size() -> None:
    inventory = dataclasses.replace(
        training().inventory, parameters=50 * MIB, largest_parameter=10 * MIB
    )
    trace = dataclasses.replace(training(), inventory=inventory)
    wide = {"dtype": "float32", "sharding": "none"}
    plain = composition(ranks=4, generation="server")
    sending = dataclasses.replace(
        plain,
        residents=tuple(dataclasses.replace(resident, **wide) for resident in plain.residents),
        sync_gathers="packed",
        sync_buffer_bytes=64 * MIB,
    )
    packed = around(sending, trace=trace)
    # 40 MiB outside the layers, then quarters of a layer, 20 each: 80, 80 and the last 40 where the
    # first was.
    assert (
        packed.sync == (("communication", 80 * MIB), ("communication", 80 * MIB))
        and packed.sync_streams == 2
    )
    cut = tuple(
        dataclasses.replace(resident, sharding="parameters") for resident in sending.residents
    )
    assert synced(around(dataclasses.replace(sending, residents=cut), trace=trace)) == 3 * 80 * MIB
    small = dataclasses.replace(sending, sync_buffer_bytes=1024 * MIB)
    assert synced(around(small, trace=trace)) == 200 * MIB, "no more than there is to send"
    before = dataclasses.replace(trace, versions={"trl": "1.10.0"})
    assert synced(around(sending, trace=before)) == 0, (
        "earlier releases send one parameter at a time, where it is"
    )


def test_a_server_without_room_for_the_buffers_fails() -> None:
    sending = dataclasses.replace(
        composition(ranks=1, generation="server"), sync_gathers="packed", sync_buffer_bytes=64 * MIB
    )
    buffers = synced(around(sending, trace=training()))
    assert receiving_failure(sending, training(), buffers) is None
    failure = receiving_failure(sending, training(), buffers - 1)
    assert failure is not None and failure.startswith("CUDA out of memory on the server's GPU")


def test_zero_3_gathers_the_model_for_its_own_generation_by_default() -> None:
    full_model = around(sharded("zero3", generation="trainer")).generation
    layers = around(
        dataclasses.replace(sharded("zero3", generation="trainer"), gathers_per_token=True)
    ).generation
    assert full_model is not None and layers is not None
    assert sum(full_model.gathered) == 100 * MIB, "all weights, beside this rank's part"
    assert sum(layers.gathered) == 2 * 40 * MIB
    plain = around(sharded("ddp", generation="trainer")).generation
    assert plain is not None and not plain.gathered


@pytest.mark.parametrize(
    ("version", "expected"), [("4.48.1", False), ("4.50.0", True), ("5.17.0", True), ("", False)]
)
def test_weights_are_loaded_at_once_by_newer_releases(version: str, expected: bool) -> None:
    trace = dataclasses.replace(training(), versions={"transformers": version})
    assert around(composition(), trace=trace).loads_at_once is expected
    assert not around(composition(ranks=2), trace=trace).loads_at_once
    # Each rank loads packed weights straight onto its card.
    plain = composition(ranks=2)
    quantised = dataclasses.replace(
        plain, residents=(dataclasses.replace(plain["policy"], quantised_bits=4),)
    )
    assert around(quantised, trace=trace).loads_at_once is expected


@pytest.mark.parametrize(
    ("framework_settings", "expected"),
    [({}, None), ({"torch_empty_cache_steps": None}, None), ({"torch_empty_cache_steps": 3}, 3)],
)
def test_the_frameworks_interval_of_emptying_the_cache(
    framework_settings: dict[str, Any], expected: int | None
) -> None:
    assert around(composition(), **framework_settings).empty_cache_steps == expected


def small() -> Trace:
    book = Book()
    book.enter("load")
    weights = book.make(100, "weights")
    book.enter("forward")
    first = book.make(10, "activations")
    second = book.make(20, "activations")
    book.drop(first)
    book.enter("backward")
    book.drop(second)
    assert weights == 1
    return book.trace()


def phases(trace: Trace) -> list[tuple[str, int, int]]:
    return [(mark.phase, span.start, span.stop) for mark, span in trace.stretches()]


def test_an_inserted_allocation_belongs_to_the_running_phase() -> None:
    trace = inserted(
        small(),
        [
            Insertion(
                event=2,
                sizes=(7,),
                parts=("workspaces",),
                order=(1,),
            )
        ],
    )
    assert trace.events == (1, 2, 4, 3, -2, -3)
    assert phases(trace) == [("load", 0, 1), ("forward", 1, 5), ("backward", 5, 6)]
    assert trace.live_parts_at(5) == {"weights": 100, "workspaces": 7}


def test_an_inserted_phase_between_two_phases_has_its_own_mark() -> None:
    trace = inserted(
        small(),
        [
            Insertion(
                event=1,
                sizes=(7,),
                parts=("kv_cache",),
                order=(1, -1),
                phase="rollout",
                step=0,
            )
        ],
    )
    assert phases(trace) == [
        ("load", 0, 1),
        ("rollout", 1, 3),
        ("forward", 3, 6),
        ("backward", 6, 7),
    ]


def test_an_inserted_phase_within_a_phase_precedes_its_rest() -> None:
    trace = inserted(
        small(),
        [
            Insertion(
                event=3,
                sizes=(7,),
                parts=("kv_cache",),
                order=(1, -1),
                phase="rollout",
                step=0,
            )
        ],
    )
    assert phases(trace) == [
        ("load", 0, 1),
        ("forward", 1, 3),
        ("rollout", 3, 5),
        ("forward", 5, 6),
        ("backward", 6, 7),
    ]


def test_an_insertion_after_the_last_event_is_appended() -> None:
    trace = inserted(
        small(),
        [
            Insertion(
                event=5,
                sizes=(7,),
                parts=("kv_cache",),
                order=(1, -1),
                phase="rollout",
                step=1,
            )
        ],
    )
    assert trace.events[-2:] == (4, -4)
    assert ("rollout", 5, 7) in phases(trace)


def test_several_insertions_keep_the_order_and_the_trace() -> None:
    plain = small()
    trace = inserted(
        plain,
        [
            Insertion(
                event=4,
                sizes=(5, 6),
                parts=("workspaces", "workspaces"),
                order=(1, 2, -1),
            ),
            Insertion(
                event=0,
                sizes=(9,),
                parts=("communication",),
                order=(1,),
            ),
        ],
    )
    original = [entry for entry in trace.events if abs(entry) <= len(plain.sizes)]
    assert tuple(original) == plain.events
    assert trace.sizes == (100, 10, 20, 9, 5, 6)
    assert trace.live_parts_at(len(trace.events) - 1) == {
        "weights": 100,
        "communication": 9,
        "workspaces": 6,
    }


def test_without_insertions_it_is_the_same() -> None:
    assert inserted(small(), []) == small()

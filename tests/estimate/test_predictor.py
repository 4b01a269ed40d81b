"""Predictions of synthetic traces: sums, intervals, verdicts, cases computed by hand."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core.composition import EngineSettings, Resident
from autotune.core.job import Hardware
from autotune.core.prediction import Prediction
from autotune.core.units import GIB, MIB
from autotune.estimate.allocator import AllocatorSettings
from autotune.estimate.predictor import predict
from autotune.estimate.replay import StepStage
from autotune.estimate.trace_context import step_context
from tests.estimate.synthetic import A100, composition, hardware, situation, training

ENGINE = EngineSettings(
    utilization=0.3,
    max_model_length=1024,
    max_num_seqs=8,
)


def predicted(**changed: Any) -> Prediction:
    return predict(situation(**changed))


# Sums and intervals.


@settings(max_examples=40, deadline=None)
@given(
    micro_batch=st.integers(1, 5),
    ranks=st.sampled_from([1, 2, 8]),
    utilization=st.sampled_from([None, 0.2, 0.6]),
    sleep=st.booleans(),
    expandable=st.booleans(),
    extra=st.sampled_from([0, 77_777]),
)
def test_every_breakdown_sums_to_its_total_to_the_byte(
    micro_batch: int,
    ranks: int,
    utilization: float | None,
    sleep: bool,
    expandable: bool,
    extra: int,
) -> None:
    engine = (
        None
        if utilization is None
        else dataclasses.replace(ENGINE, utilization=utilization, sleep=sleep)
    )
    found = predicted(
        composition=composition(
            micro_batch=micro_batch,
            ranks=ranks,
            engine=engine,
            generation="trainer" if engine is None else "engine",
            adapter_rank=16,
        ),
        hardware=hardware(count=ranks),
        trace=training(micro_batch=micro_batch, high_extra_bytes=extra),
        allocator=AllocatorSettings(expandable_segments=expandable),
    )
    assert sum(found.breakdown.values()) == found.peak_memory_bytes.value
    assert all(isinstance(size, int) and size > 0 for size in found.breakdown.values())
    for phase in found.phases:
        assert sum(phase.parts.values()) == phase.peak_bytes.value
        assert all(size > 0 for size in phase.parts.values()), phase
        assert phase.peak_bytes.value <= found.peak_memory_bytes.value
    allocated, reserved, peak = (
        found.torch_peak_allocated_bytes,
        found.torch_peak_reserved_bytes,
        found.peak_memory_bytes,
    )
    assert allocated.value <= reserved.value
    assert peak.high - peak.low >= reserved.high - reserved.low - 1 or engine is not None


@pytest.mark.parametrize("engine", [None, ENGINE, dataclasses.replace(ENGINE, sleep=True)])
def test_a_larger_micro_batch_never_needs_less(engine: EngineSettings | None) -> None:
    """Up to fragmentation: the state that remains when a cache is emptied is in other segments
    each time.
    """
    peaks = [
        predicted(
            composition=composition(
                micro_batch=micro_batch,
                engine=engine,
                generation="none" if engine is None else "engine",
            ),
            trace=training(micro_batch=micro_batch),
        ).peak_memory_bytes
        for micro_batch in range(1, 9)
    ]
    for smaller, larger in itertools.pairwise(peaks):
        assert smaller.value <= 1.01 * larger.value
        assert smaller.low <= 1.01 * larger.low
        assert smaller.high <= 1.01 * larger.high
    assert peaks[0].value < peaks[-1].value or engine is not None


def test_one_gpu_computed_by_hand() -> None:
    """Second forward pass: 100 of weights and 200 of Adam in segments of 26 per 25; activations and
    logits exactly.

    Reserved: weights 4 x 26, optimizer 8 x 26, of which 4 reuse the gradients' segments;
    activations 4 x 30 and logits 50; two workspaces of 8.125, each in a segment of 20, whose rest
    stays unused here.
    """
    found = predicted()
    context = 108 * 3.05 + 195
    parts = {name: size / MIB for name, size in found.breakdown.items()}
    assert parts["weights"] == 100
    assert parts["optimizer"] == 200
    assert parts["activations"] == 120
    assert parts["logits"] == 50
    assert parts["workspaces"] == 2 * 8.125
    assert parts["context"] == pytest.approx(context, abs=1e-3)
    assert "engine" not in parts and "communication" not in parts
    assert found.torch_peak_allocated_bytes.value == pytest.approx(
        (100 + 200 + 120 + 50 + 16.25 + 12) * MIB, abs=13 * MIB
    )
    assert found.peak_memory_bytes.value == pytest.approx(
        found.torch_peak_reserved_bytes.value + context * MIB, abs=1
    )
    assert found.peak_phase is not None
    assert found.peak_phase.name == "forward"
    assert found.fits is True


def test_a_second_gpu_adds_communication_buffers() -> None:
    one, two = predicted(), predicted(composition=composition(ranks=2), hardware=hardware(count=2))
    assert (
        two.peak_memory_bytes.value - one.peak_memory_bytes.value
        == two.breakdown["communication"]
        == 544 * MIB
    )


@pytest.mark.parametrize(
    ("sharded_by", "tensor_parallel", "at_start", "in_all"),
    [
        ("ddp", 0, 1, 1),
        ("zero2", 0, 2, 2),
        ("zero3", 0, 1, 1),
        ("fsdp2", 0, 1, 1),
        ("ddp", 1, 0, 1),
        ("zero3", 1, 1, 1),
        ("ddp", 2, 1, 3),
        ("zero2", 2, 1, 4),
    ],
)
def test_communicators_that_carry_anything(
    sharded_by: str,
    tensor_parallel: int,
    at_start: int,
    in_all: int,
) -> None:
    asleep = dataclasses.replace(
        ENGINE,
        utilization=0.6,
        tensor_parallel=max(1, tensor_parallel),
        sleep=True,
    )
    engine = asleep if tensor_parallel else None
    ranked = composition(
        engine=engine,
        generation="engine" if engine else "trainer",
        ranks=2,
    )
    found = predicted(
        composition=dataclasses.replace(ranked, sharded_by=sharded_by), hardware=hardware(count=2)
    )
    parts = {phase.name: phase.parts for phase in found.phases}
    assert parts["load"].get("communication", 0) == at_start * 544 * MIB
    assert parts["backward"]["communication"] == in_all * 544 * MIB


# The engine.


def with_engine(**changed: Any) -> Prediction:
    engine = dataclasses.replace(ENGINE, **changed)
    return predicted(composition=composition(engine=engine, generation="engine"))


def test_an_engine_adds_its_share_to_the_trainers() -> None:
    alone, beside = predicted(), with_engine()
    added = beside.peak_memory_bytes.value - alone.peak_memory_bytes.value
    assert added == pytest.approx(0.3 * 39.5 * GIB, rel=0.1)
    assert beside.engine is not None
    assert beside.breakdown["kv_cache"] == pytest.approx(
        beside.engine.kv_cache_bytes.value, rel=0.01
    )


@pytest.mark.parametrize(
    ("sharded_by", "tensor_parallel", "connected"),
    [("ddp", 1, False), ("zero3", 1, True), ("ddp", 2, True)],
)
def test_an_engine_starts_before_the_first_collective_of_ddp(
    sharded_by: str,
    tensor_parallel: int,
    connected: bool,
) -> None:
    engine = dataclasses.replace(
        ENGINE,
        utilization=0.6,
        tensor_parallel=tensor_parallel,
        sleep=True,
    )
    beside = dataclasses.replace(
        composition(
            engine=engine,
            generation="engine",
            ranks=2,
        ),
        sharded_by=sharded_by,
    )
    found = predicted(composition=beside, hardware=hardware(count=2))
    parts = {phase.name: phase.parts for phase in found.phases}
    assert ("communication" in parts["load"], "communication" in parts["rollout"]) == (
        connected,
        True,
    )
    assert "kv_cache" in parts["load"] and "optimizer" not in parts["load"]


def test_an_offloaded_engine_counts_in_the_rollout_alone() -> None:
    awake, sleeping = with_engine(), with_engine(sleep=True)
    by_name = {phase.name: phase.peak_bytes.value for phase in sleeping.phases}
    assert by_name["rollout"] > by_name["forward"] + 8 * GIB
    assert {phase.name: phase.peak_bytes.value for phase in awake.phases}["forward"] > by_name[
        "forward"
    ] + 8 * GIB
    assert sleeping.peak_phase is not None and sleeping.peak_phase.name in ("rollout", "load")
    # The pool of one that sleeps is on the device in whole segments, whose free parts serve nothing
    # else.
    assert sleeping.peak_memory_bytes.value <= awake.peak_memory_bytes.value + 64 * MIB


def test_during_the_sync_a_waking_engine_has_no_cache_yet() -> None:
    engine = dataclasses.replace(ENGINE, sleep=True)
    found = predicted(
        composition=composition(
            engine=engine,
            generation="engine",
            adapter_rank=16,
        )
    )
    parts = {phase.name: phase.parts for phase in found.phases}
    assert "kv_cache" in parts["rollout"] and "kv_cache" not in parts["sync"]
    assert parts["sync"]["workspaces"] > parts["rollout"]["workspaces"]  # the merged matrix


def test_a_sync_begins_beside_the_cache_of_the_step_before_it() -> None:
    beside = composition(engine=dataclasses.replace(ENGINE, sleep=True), generation="engine")
    found = predicted(
        composition=beside, trace=training(micro_batch=40)
    )  # a step that takes more than the engine's wake
    by_name = {phase.name: phase for phase in found.phases}
    assert by_name["sync"].peak_bytes == by_name["optimizer"].peak_bytes
    assert sum(by_name["sync"].parts.values()) == pytest.approx(
        by_name["sync"].peak_bytes.value, abs=1
    )
    assert "gradients" not in by_name["sync"].parts and "kv_cache" not in by_name["sync"].parts
    assert found.peak_phase is not None and found.peak_phase.name != "sync"


def test_an_engine_that_wakes_at_once_has_its_cache_during_the_sync() -> None:
    later, whole = with_engine(sleep=True), with_engine(sleep=True, wakes_at_once=True)
    parts = {phase.name: phase.parts for phase in whole.phases}
    assert parts["sync"]["kv_cache"] == parts["rollout"]["kv_cache"] > 0
    peaks = [
        {phase.name: phase.peak_bytes.value for phase in found.phases} for found in (later, whole)
    ]
    assert peaks[1]["sync"] == pytest.approx(peaks[0]["sync"] + parts["sync"]["kv_cache"], abs=2)


def test_the_installed_release_of_the_engine_decides_its_cache() -> None:
    engine = composition(engine=ENGINE, generation="engine")
    older, current, unknown = (
        predicted(
            composition=engine, trace=dataclasses.replace(training(), versions=versions)
        ).engine
        for versions in ({"vllm": "0.10.2"}, {"vllm": "0.31.0"}, {})
    )
    assert older is not None and current is not None
    assert older.kv_cache_bytes.value != current.kv_cache_bytes.value
    assert current == unknown


def test_an_engine_without_room_fails_with_its_own_message() -> None:
    found = with_engine(utilization=0.05)
    assert found.fits is False
    assert found.failure is not None and "gpu_memory_utilization" in found.failure


def test_an_engine_on_other_devices_takes_nothing_here_with_a_note() -> None:
    found = predicted(composition=composition(generation="server"))
    assert found.engine is None and "engine" not in found.breakdown
    assert any("other devices" in assumption for assumption in found.assumptions)


def test_transformers_generation_has_its_cache_in_the_trainers_memory() -> None:
    long = dataclasses.replace(
        composition(generation="trainer"), prompt_length=64, completion_length=2000
    )
    rollout = next(phase for phase in predicted(composition=long).phases if phase.name == "rollout")
    tokens = 8 * (64 + 1999)  # the last token's keys are never needed
    assert rollout.parts["kv_cache"] == pytest.approx(tokens * 28 * 2 * 2 * 128 * 2, rel=0.01)
    assert rollout.parts["logits"] >= 8 * 151936 * 4


# Verdicts.


def test_verdicts_by_the_interval_and_the_limit() -> None:
    peak = predicted().peak_memory_bytes
    assert predicted(limit_bytes=int(peak.high) + 1).fits is True
    assert predicted(limit_bytes=int(peak.low) - 1).fits is False
    between = predicted(limit_bytes=int((peak.low + peak.value) / 2))
    assert between.fits is None
    assert between.depends_on and all(cause for cause in between.depends_on)


def test_only_an_undecided_prediction_depends_on_something() -> None:
    for limit in (GIB // 4, GIB, 40 * GIB):
        found = predicted(limit_bytes=limit)
        assert bool(found.depends_on) is (found.fits is None)


def test_the_driver_keeps_a_part_of_the_device() -> None:
    """Within the limit, but above what CUDA has to give."""
    small = dataclasses.replace(A100, memory_mib=1300)
    found = predicted(
        gpu=small,
        hardware=hardware(small),
        limit_bytes=small.memory_bytes,
    )
    assert found.peak_memory_bytes.value < small.memory_bytes
    assert found.fits is not True
    assert found.deciding_limit.value < found.limit_bytes


def test_near_the_limit_less_memory_suffices_after_emptying_the_cache() -> None:
    """After a shorter first step no cached block fits a later request: with the cache emptied,
    the same run fits.
    """
    wide = situation(composition=composition(micro_batch=16), trace=training(micro_batch=16))
    loose = predict(wide)
    limit = int(
        loose.peak_memory_bytes.high
        - (loose.peak_memory_bytes.high - loose.peak_memory_bytes.value) / 4
    )
    tight = predict(dataclasses.replace(wide, limit_bytes=limit))
    assert limit < loose.peak_memory_bytes.high
    assert tight.fits is True
    assert tight.peak_memory_bytes.high <= limit
    assert any("empty its cache" in assumption for assumption in tight.assumptions)


def test_a_crowded_device_is_marked() -> None:
    peak = int(predicted().peak_memory_bytes.value)
    crowded = dataclasses.replace(A100, memory_mib=int(peak / 0.95 / MIB), seen_by="torch")
    found = predicted(
        gpu=crowded,
        hardware=hardware(crowded),
        limit_bytes=crowded.memory_bytes,
    )
    assert any(
        "90%" in assumption or "empty its cache" in assumption for assumption in found.assumptions
    )
    assert not any("90%" in assumption for assumption in predicted().assumptions)


# Less certain inputs: wider intervals.


def test_a_generic_step_has_a_wider_interval_except_for_weights() -> None:
    traced, generic = predicted(), predicted(trace=training(basis="generic"))
    assert generic.basis == "generic"
    assert generic.torch_peak_allocated_bytes.value == traced.torch_peak_allocated_bytes.value
    width = generic.torch_peak_allocated_bytes.high - traced.torch_peak_allocated_bytes.high
    assert width == pytest.approx(0.4 * (120 + 50 + 16.25) * MIB, rel=0.02)
    assert any("a generic step replaces" in assumption for assumption in generic.assumptions)


def test_models_outside_a_generic_step_are_counted() -> None:
    reference = Resident(
        role="reference",
        model="made",
        ranks=(0,),
        dtype="bfloat16",
        trains=False,
    )
    critic = Resident(
        role="critic",
        model="made",
        ranks=(0,),
        dtype="bfloat16",
        trains=True,
    )
    plain = predicted(trace=training(basis="generic"))
    more = predicted(
        trace=training(basis="generic"), composition=composition(others=(reference, critic))
    )
    assert more.breakdown["weights"] == plain.breakdown["weights"]
    assert more.breakdown["reference_weights"] == more.breakdown["critic_weights"] == 100 * MIB
    assert more.breakdown["critic_optimizer"] == 200 * MIB
    traced = predicted(composition=composition(others=(reference,)))
    assert traced.breakdown == predicted().breakdown  # a traced step has its reference in it


def test_experts_only_raise_the_upper_end() -> None:
    even, crowded = predicted(), predicted(trace=training(high_extra_bytes=300 * MIB))
    assert crowded.peak_memory_bytes.value == even.peak_memory_bytes.value
    assert crowded.peak_memory_bytes.high == even.peak_memory_bytes.high + 300 * MIB


def test_an_unknown_gpu_has_a_wider_interval_and_a_note() -> None:
    known, unknown = predicted(), predicted(gpu=None, hardware=hardware(None))
    assert unknown.peak_memory_bytes.high > known.peak_memory_bytes.high
    assert any("catalogue" in assumption for assumption in unknown.assumptions)


# Two ways to the same figures.


@pytest.mark.parametrize("engine", [None, dataclasses.replace(ENGINE, sleep=True)])
def test_a_step_with_other_sizes_predicts_like_a_trace_of_those_sizes(
    engine: EngineSettings | None,
) -> None:
    made = composition(
        engine=engine,
        generation="none" if engine is None else "engine",
        adapter_rank=16,
    )
    small, large = (
        situation(composition=made, trace=training(micro_batch=batch)) for batch in (1, 3)
    )
    stage = StepStage(small.trace, step_context(small)).at(
        np.array(large.trace.sizes), step_context(large)
    )
    foreseen = predict(small, stage)
    assert (
        foreseen.peak_memory_bytes
        == predict(large).peak_memory_bytes
        != predict(small).peak_memory_bytes
    )
    assert foreseen.breakdown == predict(large).breakdown


# On CPUs.


def on_cpu(**changed: Any) -> Prediction:
    ranks = changed.pop("ranks", 1)
    machine = Hardware(
        kind="cpu",
        name="cpu",
        count=ranks,
        memory_bytes=16 * GIB,
        here=True,
    )
    return predicted(
        hardware=machine,
        gpu=None,
        composition=composition(ranks=ranks),
        limit_bytes=16 * GIB,
        **changed,
    )


def test_on_a_cpu_processes_count() -> None:
    found = on_cpu()
    assert found.breakdown["weights"] == 100 * MIB
    assert found.breakdown["processes"] >= (345 + 40) * MIB
    assert sum(found.breakdown.values()) == found.peak_memory_bytes.value
    assert not {"context", "fragmentation", "workspaces"} & set(found.breakdown)
    assert found.torch_peak_allocated_bytes.value == 470 * MIB


def test_on_a_cpu_all_ranks_share_one_memory_but_the_imports_once() -> None:
    one, two = on_cpu(), on_cpu(ranks=2)
    assert two.breakdown["weights"] == 200 * MIB
    assert two.peak_memory_bytes.value < 2 * one.peak_memory_bytes.value


def test_on_a_cpu_small_models_have_wide_intervals() -> None:
    found = on_cpu().peak_memory_bytes
    assert found.high / found.low > 2


def test_a_reward_model_counts_on_a_cpu_as_on_a_gpu_and_on_every_rank() -> None:
    weights = 494_032_768 * 4

    def with_judge(ranks: int) -> Prediction:
        judge = Resident(
            role="reward",
            model="Qwen/Qwen2.5-0.5B",
            ranks=tuple(range(ranks)),
            dtype="float32",
            trains=False,
        )
        machine = Hardware(
            kind="cpu",
            name="cpu",
            count=ranks,
            memory_bytes=16 * GIB,
            here=True,
        )
        made = composition(ranks=ranks, others=(judge,))
        return predicted(
            hardware=machine,
            gpu=None,
            composition=made,
            limit_bytes=16 * GIB,
        )

    for ranks in (1, 2):
        found, without = with_judge(ranks), on_cpu(ranks=ranks)
        assert found.breakdown["reward_weights"] == ranks * weights
        assert sum(found.breakdown.values()) == found.peak_memory_bytes.value
        assert (
            found.torch_peak_allocated_bytes.value - without.torch_peak_allocated_bytes.value
            == weights
        )
        for end in ("low", "value", "high"):
            assert getattr(found.peak_memory_bytes, end) > getattr(without.peak_memory_bytes, end)


def test_torchs_peak_includes_the_other_models() -> None:
    judge = Resident(
        role="reward",
        model="Qwen/Qwen2.5-0.5B",
        ranks=(0,),
        dtype="bfloat16",
        trains=False,
    )
    found, without = predicted(composition=composition(others=(judge,))), predicted()
    assert (
        found.torch_peak_allocated_bytes.value - without.torch_peak_allocated_bytes.value
        == 2 * 494_032_768
    )


def test_an_offloaded_optimizer_is_not_back_while_weights_are_sent() -> None:
    """Setups whose sync is modelled by the gathered bytes."""
    made = composition(engine=dataclasses.replace(ENGINE, sleep=True), generation="engine")
    sending = dataclasses.replace(made, sync_gathers="parameter", sync_buffer_bytes=64 * MIB)
    stays, leaves = (
        predicted(composition=dataclasses.replace(sending, offloaded_in_rollout=away))
        for away in ((), ("optimizer",))
    )

    def at(found: Prediction, name: str) -> float:
        return next(phase.peak_bytes.value for phase in found.phases if phase.name == name)

    assert at(stays, "sync") - at(leaves, "sync") == 200 * MIB
    assert at(stays, "backward") == at(leaves, "backward")

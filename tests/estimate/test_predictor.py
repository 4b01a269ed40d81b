"""Predictions of synthetic traces: sums, intervals, verdicts, cases computed by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core.composition import EngineSettings, Resident
from autotune.core.job import Hardware
from autotune.core.prediction import EngineFit, PhasePrediction, Prediction
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


def notes_of(prediction: Prediction) -> str:
    return "\n".join(prediction.assumptions)


def phase_of(prediction: Prediction, name: str) -> PhasePrediction:
    return next(phase for phase in prediction.phases if phase.name == name)


def peak_in(prediction: Prediction, name: str) -> float:
    return phase_of(prediction, name).peak_bytes.value


def parts_by_phase(prediction: Prediction) -> dict[str, Mapping[str, int]]:
    return {phase.name: phase.parts for phase in prediction.phases}


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
    prediction = predicted(
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
    assert sum(prediction.breakdown.values()) == prediction.peak_memory_bytes.value
    assert all(isinstance(size, int) and size > 0 for size in prediction.breakdown.values())
    for phase in prediction.phases:
        assert sum(phase.parts.values()) == phase.peak_bytes.value
        assert all(size > 0 for size in phase.parts.values()), phase
        assert phase.peak_bytes.value <= prediction.peak_memory_bytes.value
    allocated, reserved, peak = (
        prediction.torch_peak_allocated_bytes,
        prediction.torch_peak_reserved_bytes,
        prediction.peak_memory_bytes,
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
    prediction = predicted()
    context = 108 * 3.05 + 195
    parts = {name: size / MIB for name, size in prediction.breakdown.items()}
    assert parts["weights"] == 100
    assert parts["optimizer"] == 200
    assert parts["activations"] == 120
    assert parts["logits"] == 50
    assert parts["workspaces"] == 2 * 8.125
    assert parts["context"] == pytest.approx(context, abs=1e-3)
    assert "engine" not in parts and "communication" not in parts
    assert prediction.torch_peak_allocated_bytes.value == pytest.approx(
        (100 + 200 + 120 + 50 + 16.25 + 12) * MIB, abs=13 * MIB
    )
    assert prediction.peak_memory_bytes.value == pytest.approx(
        prediction.torch_peak_reserved_bytes.value + context * MIB, abs=1
    )
    assert prediction.peak_phase is not None
    assert prediction.peak_phase.name == "forward"
    assert prediction.fits is True


def test_a_second_gpu_adds_communication_buffers() -> None:
    single, two = (
        predicted(),
        predicted(composition=composition(ranks=2), hardware=hardware(count=2)),
    )
    assert (
        two.peak_memory_bytes.value - single.peak_memory_bytes.value
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
    prediction = predicted(
        composition=dataclasses.replace(ranked, sharded_by=sharded_by), hardware=hardware(count=2)
    )
    parts = parts_by_phase(prediction)
    assert parts["load"].get("communication", 0) == at_start * 544 * MIB
    assert parts["backward"]["communication"] == in_all * 544 * MIB


# The engine.


def with_engine(**changed: Any) -> Prediction:
    engine = dataclasses.replace(ENGINE, **changed)
    return predicted(composition=composition(engine=engine, generation="engine"))


def test_an_engine_adds_its_share_to_the_trainers() -> None:
    trainer_only, combined = predicted(), with_engine()
    added = combined.peak_memory_bytes.value - trainer_only.peak_memory_bytes.value
    assert added == pytest.approx(0.3 * 39.5 * GIB, rel=0.1)
    assert combined.engine is not None
    assert combined.breakdown["kv_cache"] == pytest.approx(
        combined.engine.kv_cache_bytes.value, rel=0.01
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
    colocated = dataclasses.replace(
        composition(
            engine=engine,
            generation="engine",
            ranks=2,
        ),
        sharded_by=sharded_by,
    )
    prediction = predicted(composition=colocated, hardware=hardware(count=2))
    parts = parts_by_phase(prediction)
    assert ("communication" in parts["load"], "communication" in parts["rollout"]) == (
        connected,
        True,
    )
    assert "kv_cache" in parts["load"] and "optimizer" not in parts["load"]


def test_an_offloaded_engine_counts_in_the_rollout_alone() -> None:
    awake, sleeping = with_engine(), with_engine(sleep=True)
    forward = peak_in(sleeping, "forward")
    assert peak_in(sleeping, "rollout") > forward + 8 * GIB
    assert peak_in(awake, "forward") > forward + 8 * GIB
    assert sleeping.peak_phase is not None and sleeping.peak_phase.name in ("rollout", "load")
    # The pool of one that sleeps is on the device in whole segments, whose free parts serve nothing
    # else; its cache has what the rotary tables left.
    assert sleeping.peak_memory_bytes.value <= awake.peak_memory_bytes.value + 2 * 64 * MIB


def test_during_the_sync_a_waking_engine_has_no_cache_yet() -> None:
    engine = dataclasses.replace(ENGINE, sleep=True)
    prediction = predicted(
        composition=composition(
            engine=engine,
            generation="engine",
            adapter_rank=16,
        )
    )
    parts = parts_by_phase(prediction)
    assert "kv_cache" in parts["rollout"] and "kv_cache" not in parts["sync"]
    assert parts["sync"]["workspaces"] > parts["rollout"]["workspaces"]  # the merged matrix


def test_a_sync_begins_beside_the_cache_of_the_step_before_it() -> None:
    colocated = composition(engine=dataclasses.replace(ENGINE, sleep=True), generation="engine")
    prediction = predicted(
        composition=colocated, trace=training(micro_batch=40)
    )  # a step that takes more than the engine's wake
    sync = phase_of(prediction, "sync")
    assert sync.peak_bytes == phase_of(prediction, "optimizer").peak_bytes
    assert sum(sync.parts.values()) == pytest.approx(sync.peak_bytes.value, abs=1)
    assert "gradients" not in sync.parts and "kv_cache" not in sync.parts
    assert prediction.peak_phase is not None and prediction.peak_phase.name != "sync"


def test_an_engine_that_wakes_at_once_has_its_cache_during_the_sync() -> None:
    later, immediate = with_engine(sleep=True), with_engine(sleep=True, wakes_at_once=True)
    parts = parts_by_phase(immediate)
    assert parts["sync"]["kv_cache"] == parts["rollout"]["kv_cache"] > 0
    expected = peak_in(later, "sync") + parts["sync"]["kv_cache"]
    assert peak_in(immediate, "sync") == pytest.approx(expected, abs=2)


def test_the_installed_release_of_the_engine_decides_its_cache() -> None:
    def engine_of(**versions: str) -> EngineFit | None:
        trace = dataclasses.replace(training(), versions=versions)
        engine = composition(engine=ENGINE, generation="engine")
        return predicted(composition=engine, trace=trace).engine

    older, current, unknown = engine_of(vllm="0.10.2"), engine_of(vllm="0.31.0"), engine_of()
    assert older is not None and current is not None
    assert older.kv_cache_bytes.value != current.kv_cache_bytes.value
    assert current == unknown


def test_an_engine_without_room_fails_with_its_own_message() -> None:
    prediction = with_engine(utilization=0.05)
    assert prediction.fits is False
    assert prediction.failure is not None and "gpu_memory_utilization" in prediction.failure


def test_an_engine_on_other_devices_takes_nothing_here_with_a_note() -> None:
    prediction = predicted(composition=composition(generation="server"))
    assert prediction.engine is None and "engine" not in prediction.breakdown
    assert "other devices" in notes_of(prediction)


def test_transformers_generation_has_its_cache_in_the_trainers_memory() -> None:
    long = dataclasses.replace(
        composition(generation="trainer"), prompt_length=64, completion_length=2000
    )
    rollout = phase_of(predicted(composition=long), "rollout")
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
    assert between.depends_on and all(between.depends_on)


def test_only_an_undecided_prediction_depends_on_something() -> None:
    for limit in (GIB // 4, GIB, 40 * GIB):
        prediction = predicted(limit_bytes=limit)
        assert bool(prediction.depends_on) is (prediction.fits is None)


def test_the_driver_keeps_a_part_of_the_device() -> None:
    """Within the limit, but above what CUDA has to give."""
    small = dataclasses.replace(A100, memory_mib=1300)
    prediction = predicted(
        gpu=small,
        hardware=hardware(small),
        limit_bytes=small.memory_bytes,
    )
    assert prediction.peak_memory_bytes.value < small.memory_bytes
    assert prediction.fits is not True
    assert prediction.deciding_limit.value < prediction.limit_bytes


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
    assert "empty its cache" in notes_of(tight)


def test_a_crowded_device_is_marked() -> None:
    peak = int(predicted().peak_memory_bytes.value)
    crowded = dataclasses.replace(A100, memory_mib=int(peak / 0.95 / MIB), seen_by="torch")
    prediction = predicted(
        gpu=crowded,
        hardware=hardware(crowded),
        limit_bytes=crowded.memory_bytes,
    )
    assert "90%" in notes_of(prediction) or "empty its cache" in notes_of(prediction)
    assert "90%" not in notes_of(predicted())


# Less certain inputs: wider intervals.


def test_a_generic_step_has_a_wider_interval_except_for_weights() -> None:
    traced, generic = predicted(), predicted(trace=training(basis="generic"))
    assert generic.basis == "generic"
    assert generic.torch_peak_allocated_bytes.value == traced.torch_peak_allocated_bytes.value
    width = generic.torch_peak_allocated_bytes.high - traced.torch_peak_allocated_bytes.high
    assert width == pytest.approx(0.4 * (120 + 50 + 16.25) * MIB, rel=0.02)
    assert "a generic step replaces" in notes_of(generic)


def test_code_that_the_framework_shares_has_a_narrower_interval() -> None:
    """10 % of 120 MiB of activations and 16.25 of workspaces, 40 % of 50 MiB of logits. Of shared
    logits the interval is narrower above alone: a prompt may have none.
    """
    layers = ("activations", "workspaces")
    traced = predicted().torch_peak_allocated_bytes

    def widths(*parts: str) -> tuple[float, float]:
        """MiB below and above the interval of a traced step."""
        shared = dataclasses.replace(composition(), same_code_parts=parts)
        trace = training(basis="generic")
        generic = predicted(trace=trace, composition=shared).torch_peak_allocated_bytes
        below = (traced.low - generic.low) / MIB
        return below, (generic.high - traced.high) / MIB

    assert widths(*layers) == pytest.approx((13.6 + 12.5, 13.6 + 20), rel=0.02)
    assert widths(*layers, "logits") == pytest.approx((13.6 + 12.5, 13.6 + 5), rel=0.02)


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
    extended = predicted(
        trace=training(basis="generic"), composition=composition(other_models=(reference, critic))
    )
    assert extended.breakdown["weights"] == plain.breakdown["weights"]
    assert (
        extended.breakdown["reference_weights"] == extended.breakdown["critic_weights"] == 100 * MIB
    )
    assert extended.breakdown["critic_optimizer"] == 200 * MIB
    traced = predicted(composition=composition(other_models=(reference,)))
    assert traced.breakdown == predicted().breakdown  # a traced step has its reference in it


def test_experts_only_raise_the_upper_end() -> None:
    even, crowded = predicted(), predicted(trace=training(high_extra_bytes=300 * MIB))
    assert crowded.peak_memory_bytes.value == even.peak_memory_bytes.value
    assert crowded.peak_memory_bytes.high == even.peak_memory_bytes.high + 300 * MIB


def test_an_unknown_gpu_has_a_wider_interval_and_a_note() -> None:
    catalogued, unknown = predicted(), predicted(gpu=None, hardware=hardware(None))
    assert unknown.peak_memory_bytes.high > catalogued.peak_memory_bytes.high
    assert "catalogue" in notes_of(unknown)


# Two ways to the same figures.


@pytest.mark.parametrize("engine", [None, dataclasses.replace(ENGINE, sleep=True)])
def test_a_step_with_other_sizes_predicts_like_a_trace_of_those_sizes(
    engine: EngineSettings | None,
) -> None:
    composed = composition(
        engine=engine,
        generation="none" if engine is None else "engine",
        adapter_rank=16,
    )
    small = situation(composition=composed, trace=training(micro_batch=1))
    large = situation(composition=composed, trace=training(micro_batch=3))
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
    prediction = on_cpu()
    assert prediction.breakdown["weights"] == 100 * MIB
    assert prediction.breakdown["processes"] >= (345 + 40) * MIB
    assert sum(prediction.breakdown.values()) == prediction.peak_memory_bytes.value
    assert not {"context", "fragmentation", "workspaces"} & set(prediction.breakdown)
    assert prediction.torch_peak_allocated_bytes.value == 470 * MIB


def test_on_a_cpu_all_ranks_share_one_memory_but_the_imports_once() -> None:
    single, two = on_cpu(), on_cpu(ranks=2)
    assert two.breakdown["weights"] == 200 * MIB
    assert two.peak_memory_bytes.value < 2 * single.peak_memory_bytes.value


def test_on_a_cpu_small_models_have_wide_intervals() -> None:
    peak = on_cpu().peak_memory_bytes
    assert peak.high / peak.low > 2


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
        composed = composition(ranks=ranks, other_models=(judge,))
        return predicted(
            hardware=machine,
            gpu=None,
            composition=composed,
            limit_bytes=16 * GIB,
        )

    for ranks in (1, 2):
        prediction, without = with_judge(ranks), on_cpu(ranks=ranks)
        assert prediction.breakdown["reward_weights"] == ranks * weights
        assert sum(prediction.breakdown.values()) == prediction.peak_memory_bytes.value
        assert (
            prediction.torch_peak_allocated_bytes.value - without.torch_peak_allocated_bytes.value
            == weights
        )
        for end in ("low", "value", "high"):
            assert getattr(prediction.peak_memory_bytes, end) > getattr(
                without.peak_memory_bytes, end
            )


def test_torchs_peak_includes_the_other_models() -> None:
    judge = Resident(
        role="reward",
        model="Qwen/Qwen2.5-0.5B",
        ranks=(0,),
        dtype="bfloat16",
        trains=False,
    )
    prediction, without = predicted(composition=composition(other_models=(judge,))), predicted()
    assert (
        prediction.torch_peak_allocated_bytes.value - without.torch_peak_allocated_bytes.value
        == 2 * 494_032_768
    )


def test_an_offloaded_optimizer_is_not_back_while_weights_are_sent() -> None:
    """Setups whose sync is modelled by the gathered bytes."""
    composed = composition(engine=dataclasses.replace(ENGINE, sleep=True), generation="engine")
    sending = dataclasses.replace(composed, sync_gathers="parameter", sync_buffer_bytes=64 * MIB)
    offloading = dataclasses.replace(sending, offloaded_in_rollout=("optimizer",))
    stays, leaves = predicted(composition=sending), predicted(composition=offloading)
    assert peak_in(stays, "sync") - peak_in(leaves, "sync") == 200 * MIB
    assert peak_in(stays, "backward") == peak_in(leaves, "backward")

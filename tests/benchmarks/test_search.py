"""The search's benchmark is itself right: the simulator behaves as memory does, and no share is
above one.
"""

from __future__ import annotations

import inspect
import random
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import search_constants  # noqa: E402
from search_cases import CASES, Posed, pose  # noqa: E402
from search_machines import Optimum, Simulated  # noqa: E402
from search_rivals import RIVALS, Arena, run  # noqa: E402
from search_setups import gpu_of  # noqa: E402
from search_simulator import Machine, Quirks, Shape, Tail  # noqa: E402

from autotune.core.space import Candidate  # noqa: E402
from autotune.search import agenda, confirmation  # noqa: E402
from autotune.search.loop import SHORT_PROBE  # noqa: E402
from autotune.search.surrogate.gaussian_process import (  # noqa: E402
    KERNEL_STRUCTURES,
    Regression,
)

MICRO = "per_device_train_batch_size"
CASE_BY_NAME = {case.name: case for case in CASES}


def machine_of(name: str, seed: int = 0) -> tuple[Posed, Simulated]:
    case = CASE_BY_NAME[name]
    posed = pose(case)
    shape = Shape.of(posed.job.task.workload.model.config)
    dice = random.Random(seed)
    formulas = Machine(
        shape, gpu_of(case), case.hardware.count, posed.job.memory_limit_bytes, Quirks.drawn(dice)
    )
    return posed, Simulated(
        formulas,
        memory_level=1.0,
        speed_level=1.0,
        seed=seed,
    )


def first_with(posed: Posed, **knobs: object) -> Candidate:
    """Return the first candidate with these knobs."""
    for candidate in posed.candidates:
        if knobs.items() <= candidate.knobs.items():
            return candidate
    raise LookupError(knobs)


def first_with_cause(
    candidates: Iterable[Candidate],
    machine: Simulated,
    cause: object,
) -> Candidate:
    return next(candidate for candidate in candidates if machine.truth(candidate).cause == cause)


def changed(posed: Posed, candidate: Candidate, **changes: object) -> Candidate | None:
    """The candidate that differs in these knobs alone."""
    loose = ("gradient_accumulation_steps",)
    knobs = {}
    for name, value in {**candidate.knobs, **changes}.items():
        if name not in loose:
            knobs[name] = value
    for neighbour in posed.candidates:
        if {k: v for k, v in neighbour.knobs.items() if k not in loose} == knobs:
            return neighbour
    return None


@pytest.mark.parametrize("case", CASE_BY_NAME)
def test_the_parameter_count_is_the_models_own(case: str) -> None:
    _, machine = machine_of(case)
    billions = {
        "0.5b": 0.494,
        "1.5b": 1.544,
        "3b": 3.086,
        "7b": 7.616,
        "8b": 8.030,
        "14b": 14.77,
        "32b": 32.76,
        "70b": 70.55,
    }
    size = re.search(r"-(\d[\d.]*b)-", case)
    assert size is not None
    assert machine._formulas.shape.parameters == pytest.approx(billions[size[1]] * 1e9, rel=0.002)


@pytest.mark.parametrize("case", ["qwen2.5-1.5b-lora-l4", "qwen2.5-7b-full-4xa100-80g"])
def test_a_larger_micro_batch_needs_no_less_for_training(case: str) -> None:
    posed, machine = machine_of(case)
    pairs = []
    for candidate in posed.candidates:
        pairs.append(
            (
                candidate,
                changed(posed, candidate, **{MICRO: 2 * int(candidate.settings[MICRO] or 0)}),
            )
        )
    compared = []
    for small, large in pairs:
        if large is not None:
            compared.append((machine.truth(small), machine.truth(large)))
    assert len(compared) > 100
    for small, large in compared:
        if small.cause is None and large.cause is None:
            assert large.peak_bytes >= 0.999 * small.peak_bytes


def test_sharding_the_weights_costs_memory_where_adapters_are_merged_and_saves_it_else() -> None:
    for case, strategy, saves in (
        ("qwen2.5-7b-full-4xa100-80g", "zero2", True),
        ("llama-3.1-8b-lora-2xa100-40g", "ddp", False),
    ):
        posed, machine = machine_of(case)
        sharded = first_with(posed, use_vllm=True, sharding="zero3")
        without = changed(posed, sharded, sharding=strategy)
        assert without is not None
        assert (machine.truth(sharded).peak_bytes < machine.truth(without).peak_bytes) is saves


def test_an_engine_with_too_small_a_share_fails_for_its_cache_and_one_with_little_is_slow() -> None:
    posed, machine = machine_of("qwen2.5-7b-lora-a100-80g")
    engines, by_share = [], {}
    for candidate in posed.candidates:
        if candidate.knobs.get("use_vllm") and candidate.settings[MICRO] == 1:
            engines.append(candidate)
            by_share[candidate.knobs["vllm_gpu_memory_utilization"]] = machine.truth(candidate)
    assert (
        by_share[0.2].cause == "kv_cache"
        or by_share[0.2].by_phase["rollout"] > 2 * by_share[0.4].by_phase["rollout"]
    )
    assert by_share[0.4].cause is None
    measured = machine.measure(first_with_cause(engines, machine, None), SHORT_PROBE)
    assert measured.outcome == "ok"


def test_a_failed_probe_says_what_the_messages_say() -> None:
    posed, machine = machine_of("qwen2.5-1.5b-lora-l4")
    failing = first_with_cause(posed.candidates, machine, "activations")
    measured = machine.measure(failing, SHORT_PROBE)
    assert measured.outcome.is_out_of_memory
    assert measured.failure is not None
    assert "Tried to allocate" in measured.failure.evidence
    assert {"asked_bytes", "free_bytes"} <= set(measured.failure.numbers)
    assert machine.now == pytest.approx(measured.cost.total_seconds)


@pytest.mark.parametrize("rival", [name for name in RIVALS if name != "GP"])
def test_no_searcher_beats_the_optimum_and_all_end_within_their_probes(rival: str) -> None:
    posed, machine = machine_of("qwen2.5-3b-lora-a100-40g", seed=3)
    space = posed.job.space
    optimum = Optimum.of(machine, space, posed.candidates)
    assert optimum is not None
    assert len(optimum.speeds) > 10
    probes = run(
        RIVALS[rival],
        Arena(
            machine=machine,
            space=space,
            candidates=posed.candidates,
            most=12,
        ),
        seed=3,
    )
    assert 1 <= len(probes) <= 12
    assert len({probe.candidate.id for probe in probes}) == len(probes)
    shares = [optimum.share(probe.candidate) for probe in probes]
    assert min(shares) >= 0 and 0 < max(shares) <= 1


@pytest.mark.slow
@pytest.mark.long
def test_a_few_studies_of_every_setup_are_in_order() -> None:
    ended = subprocess.run(
        [sys.executable, "benchmarks/search.py", "--quick"],
        cwd=BENCHMARKS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "all in order" in ended.stdout


def test_the_worse_truth_differs_by_knob_and_keeps_memory_at_the_longest() -> None:
    name = "qwen2.5-1.5b-lora-l4"
    posed, near = machine_of(name)
    case = CASE_BY_NAME[name]
    quirks = replace(
        near._formulas.quirks,
        small_share=3.0,
        plain=2.0,
        recompute=2.0,
        sleeping=3.0,
        tail=Tail.drawn(random.Random(1)),
    )
    far = Simulated(
        replace(near._formulas, quirks=quirks),
        memory_level=1.0,
        speed_level=1.0,
        seed=0,
    )
    slower = []
    for candidate in posed.candidates:
        before, after = near.truth(candidate), far.truth(candidate)
        assert after.peak_bytes == before.peak_bytes and after.tokens < before.tokens
        if before.cause is None:
            slower.append(
                (after.cycle_seconds / after.tokens) / (before.cycle_seconds / before.tokens)
            )
    assert max(slower) > 1.5 * min(slower), case.name


def test_a_variant_of_a_constant_changes_every_module_that_has_it() -> None:
    former = confirmation.TRAINING_SECONDS
    with search_constants.changed("TRAINING_SECONDS 86400.0"):
        assert confirmation.TRAINING_SECONDS == agenda.TRAINING_SECONDS == 86_400.0
    assert confirmation.TRAINING_SECONDS == agenda.TRAINING_SECONDS == former


def test_a_variant_of_the_kernels_is_the_regressions_default() -> None:
    single = KERNEL_STRUCTURES[:1]
    with search_constants.changed(f"KERNEL_STRUCTURES {single}"):
        assert inspect.signature(Regression).parameters["structures"].default == single
    assert inspect.signature(Regression).parameters["structures"].default is KERNEL_STRUCTURES

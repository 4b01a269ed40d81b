"""CPU time of the search itself with five thousand candidates."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from search_cases import CASES, SEVERAL, posed
from search_machines import Simulated
from search_setups import gpu_of
from search_simulator import Machine, Quirks, Shape, Truth

from autotune.catalog import model_lookup
from autotune.core.job import Task, Workload
from autotune.core.prediction import Estimate, Prediction
from autotune.core.space import KnobValue
from autotune.search.agenda import RemainingBudget
from autotune.search.loop import SHORT_PROBE
from autotune.search.study import TrialRequest, open_study

PROBES = 25
CANDIDATES = 5000


def five_thousand() -> dict[str, float]:
    """Return milliseconds of CPU time per request and result, over 25 probes; predictions are
    synthetic, near the truth."""
    case = next(case for case in CASES if case.name.endswith("7b-full-4xa100-80g"))
    shares = tuple(round(0.15 + 0.025 * step, 3) for step in range(20))
    choices: dict[str, Sequence[KnobValue]] = {
        "sharding": SEVERAL["full"],
        "vllm_tensor_parallel_size": (1, 2, 4),
        "vllm_gpu_memory_utilization": shares,
    }
    workload = Workload(
        model=model_lookup.find_model(case.model),
        python=Path(sys.executable),
        tuning="full",
        global_batch=64,
    )
    posed_search = posed(
        Task(workload=workload, hardware=case.hardware),
        "cards",
        choices,
        case.hardware.memory_bytes,
    )
    candidates = posed_search.candidates[:CANDIDATES]
    dice = random.Random(0)
    formulas = Machine(
        Shape.of(workload.model.config),
        gpu_of(case),
        case.hardware.count,
        posed_search.job.memory_limit_bytes,
        Quirks.drawn(dice),
    )
    machine = Simulated(
        formulas,
        memory_level=1.0,
        speed_level=1.0,
        seed=0,
    )
    predictions = {}
    for candidate in candidates:
        predictions[candidate.id] = _made_up(
            candidate.id, machine.truth(candidate), dice, posed_search.job.memory_limit_bytes
        )
    job = replace(posed_search.job, sampler="value")
    began = time.process_time()
    study = open_study(job, candidates, posed_search.baseline, predictions=predictions)
    opening, durations = time.process_time() - began, []
    for remaining in range(PROBES, 0, -1):
        began = time.process_time()
        step = study.ask(RemainingBudget(seconds=1e9, probes=remaining))
        if not isinstance(step, TrialRequest):
            break
        asking = time.process_time() - began
        measurement = machine.measure(step.candidate, SHORT_PROBE)
        began = time.process_time()
        study.tell(step, measurement)
        durations.append(asking + time.process_time() - began)
    return {
        "candidates": len(candidates),
        "probes": len(durations),
        "opening_ms": 1000 * opening,
        "median_ms": 1000 * statistics.median(durations),
        "longest_ms": 1000 * max(durations),
    }


def _made_up(
    name: str,
    truth: Truth,
    dice: random.Random,
    limit: int,
) -> Prediction:
    peak = truth.peak_bytes * dice.uniform(0.9, 1.1)
    speed = truth.tokens / truth.cycle_seconds * dice.uniform(0.8, 1.25)
    memory = Estimate(
        value=peak,
        low=0.93 * peak,
        high=1.1 * peak,
    )
    return Prediction(
        candidate_id=name,
        basis="traced",
        fits=None,
        limit_bytes=limit,
        peak_memory_bytes=memory,
        torch_peak_allocated_bytes=memory,
        torch_peak_reserved_bytes=memory,
        tokens_per_second=Estimate(
            value=speed,
            low=speed / 2,
            high=speed * 2,
        ),
    )

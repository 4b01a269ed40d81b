"""Setups of the search benchmark: simulated cases and replayed tables, each with its job,
machine and truth.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from search_cases import CASES, Case, Posed, pose, posed
from search_independent import Independent
from search_machines import CLUSTER, Machine, Noise, Optimum, Replayed, Simulated, load_costs
from search_predictions import file_of, read
from search_simulator import Machine as Formulas
from search_simulator import Quirks, Shape

from autotune import catalog
from autotune.catalog import Gpu
from autotune.core.job import Model, Task, Workload
from autotune.core.prediction import Prediction
from autotune.core.units import parse_bytes
from autotune.machine import hardware_detection

RESULTS = Path(__file__).resolve().parent / "results" / "search"
WORSE = "-worse"
"""Ending of a simulated case's name whose truth contradicts the prediction."""

INDEPENDENT = "-independent"
"""Ending of one whose truth is the prediction with an independent error of each candidate."""


@dataclass(frozen=True)
class Truthfulness:
    """Maximum deviation of the simulator's level from the prediction; its parts are drawn on top
    of that.
    """

    memory_off: float
    speed_off: float
    quirks: Callable[[random.Random], Quirks]
    noise: Noise


NEAR = Truthfulness(0.08, 0.15, Quirks.drawn, Noise())
FAR = Truthfulness(0.25, 2.0, Quirks.worse, CLUSTER)


@dataclass(frozen=True)
class Setup:
    """Question, and a machine for each seed."""

    name: str
    kind: str
    """`simulated` or `measured`."""

    posed: Posed
    predictions: Mapping[str, Prediction]
    machine: Callable[[int], Machine]

    def optimum(self, machine: Machine) -> Optimum | None:
        return Optimum.of(machine, self.posed.job.space, self.posed.candidates)


def names(*, ending: str = "") -> list[str]:
    """Return the names of all setups: cases with predictions, and tables; or the cases alone
    with another truth.
    """
    if ending:
        return [case.name + ending for case in CASES if file_of(case).exists()]
    return [case.name for case in CASES if file_of(case).exists()] + [
        path.stem for path in sorted(RESULTS.glob("table_*.json"))
    ]


@cache
def setup(name: str) -> Setup:
    plain_name = name.removesuffix(WORSE).removesuffix(INDEPENDENT)
    case = next((case for case in CASES if case.name == plain_name), None)
    if case is None:
        return _table(name)
    if name.endswith(INDEPENDENT):
        return _with_independent_errors(name, case)
    return _simulated(name, case, FAR if name.endswith(WORSE) else NEAR)


# Simulated.


def _simulated(
    name: str,
    case: Case,
    truth: Truthfulness,
) -> Setup:
    posed_case = pose(case)
    predictions = read(case, posed_case)
    return Setup(
        name,
        "simulated",
        posed_case,
        predictions,
        lambda seed: simulated_machine(case, posed_case, predictions, seed, truth),
    )


def simulated_machine(
    case: Case,
    posed_case: Posed,
    predictions: Mapping[str, Prediction],
    seed: int,
    truth: Truthfulness = NEAR,
) -> Simulated:
    """Quirks and levels drawn by the seed. The predictions set the levels alone: one factor for
    memory, one for speed.
    """
    dice = random.Random(f"{case.name} {seed}")
    quirks = truth.quirks(dice)
    returned = random.Random(f"returned {case.name} {seed}").uniform(0.3, 0.9)
    formulas = Formulas(
        shape=Shape.of(posed_case.job.task.workload.model.config),
        gpu=gpu_of(case),
        ranks=case.hardware.count,
        limit_bytes=posed_case.job.memory_limit_bytes,
        quirks=replace(quirks, returned=returned),
    )
    memory, speed = _levels(posed_case, predictions, formulas)
    memory *= math.exp(dice.uniform(-1, 1) * math.log(1 + truth.memory_off))
    speed *= math.exp(dice.uniform(-1, 1) * math.log(1 + truth.speed_off))
    scaled = replace(
        formulas,
        limit_bytes=round(formulas.limit_bytes / memory),
        gpu=replace(formulas.gpu, memory_mib=round(formulas.gpu.memory_mib / memory)),
    )
    return Simulated(
        scaled,
        memory_level=memory,
        speed_level=speed,
        seed=dice.randrange(2**31),
        noise=truth.noise,
    )


def _with_independent_errors(name: str, case: Case) -> Setup:
    posed_case = pose(case)
    predictions = read(case, posed_case)
    formulas = Formulas(
        shape=Shape.of(posed_case.job.task.workload.model.config),
        gpu=gpu_of(case),
        ranks=case.hardware.count,
        limit_bytes=posed_case.job.memory_limit_bytes,
        quirks=Quirks.drawn(random.Random(0)),
    )

    def machine(seed: int) -> Simulated:
        limit_bytes = posed_case.job.memory_limit_bytes
        truth = Independent(formulas, predictions, seed, limit_bytes)
        return Simulated(
            truth,
            memory_level=1.0,
            speed_level=1.0,
            seed=seed,
        )

    return Setup(name, "simulated", posed_case, predictions, machine)


def gpu_of(case: Case) -> Gpu:
    return next(gpu for gpu in catalog.gpus() if gpu.name == case.hardware.name)


def _levels(
    posed_case: Posed,
    predictions: Mapping[str, Prediction],
    formulas: Formulas,
) -> tuple[float, float]:
    """The median candidate's prediction over the simulator's raw figure."""
    memory, speed = [], []
    for candidate in posed_case.candidates:
        truth, prediction = formulas.truth(candidate), predictions[candidate.id]
        if truth.phase != "load" or truth.cause is None:
            memory.append(prediction.peak_memory_bytes.value / truth.peak_bytes)
        if truth.cause is None and prediction.tokens_per_second is not None:
            speed.append(prediction.tokens_per_second.value / (truth.tokens / truth.cycle_seconds))
    return statistics.median(memory), statistics.median(speed)


def distance(setup: Setup, seed: int) -> dict[str, float]:
    """Return the deviation of this study's truth from the prediction, over the candidates that
    truly fit. The search never sees this.
    """
    machine = setup.machine(seed)
    assert isinstance(machine, Simulated)
    memory, speed = [], []
    for candidate in setup.posed.candidates:
        rate, prediction = machine.mean_speed(candidate), setup.predictions[candidate.id]
        if rate is not None:
            peak = machine.peak_bytes(candidate)
            memory.append(abs(math.log(peak / prediction.peak_memory_bytes.value)))
            if prediction.tokens_per_second is not None:
                speed.append(abs(math.log(rate / prediction.tokens_per_second.value)))
    distances = {}
    for name, values in (("memory", memory), ("speed", speed)):
        for word, share in (("median", 0.5), ("ninth_tenth", 0.9)):
            if values:
                distances[f"{name}_{word}"] = math.expm1(_quantile(values, share))
    return distances


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# Measured.


def _table(name: str) -> Setup:
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    limit = parse_bytes(stored["limit"])
    model = Model(
        name="made-up",
        config=stored["model_config"],
        folder=None,
        origin="made up",
    )
    workload = Workload(
        model=model,
        python=Path(sys.executable),
        tuning="full",
        global_batch=stored["global_batch"],
    )
    posed_table = posed(
        Task(workload=workload, hardware=hardware_detection.hardware("cpu")),
        stored["space"],
        {},
        limit,
    )
    by_knobs: dict[str, list[dict[str, Any]]] = {}
    for row in stored["rows"]:
        by_knobs.setdefault(json.dumps(row["knobs"], sort_keys=True), []).append(row)
    rows = {}
    for candidate in posed_table.candidates:
        rows[candidate.id] = by_knobs[json.dumps(dict(candidate.knobs), sort_keys=True)]
    loads = load_costs(posed_table.candidates, rows)
    return Setup(
        name, "measured", posed_table, {}, lambda seed: Replayed(rows, limit, loads, seed=seed)
    )

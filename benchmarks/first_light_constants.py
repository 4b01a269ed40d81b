"""Constants of the catalogue, compared with what a card shows.

A constant is contradicted by a measured value outside its interval. On emulated cards memory
outside torch is made from the constants, and nothing has a speed: there is nothing to compare.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune import catalog
from autotune.catalog import Gpu
from autotune.catalog.attention_kernels import AttentionUse, attention_share, kernel_of
from autotune.core.prediction import Estimate
from autotune.core.units import MIB

Line = Mapping[str, Any]
Facts = Mapping[str, Sequence[Any]]
"""Values of each fact, in the order of the file."""

ATTENTION = "attention_share"
FIRST_HOPPER = 9  # compute capability from which cuBLAS's workspace is larger
WIDE_LAYERS = ("7b up", "7b down", "7b query")
FEW_TOKENS = 1024  # products of so few rows are not those of training
LONG_ROWS = 2048  # attention at shorter rows is not what the constant is about


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A constant with its interval, and the value that a card showed."""

    name: str
    unit: str
    low: float
    value: float
    high: float
    measured: float

    @property
    def contradicted(self) -> bool:
        return not self.low <= self.measured <= self.high


def facts_of(lines: Iterable[Line]) -> dict[str, list[Any]]:
    """Return the facts by name, without those that are errors."""
    values: dict[str, list[Any]] = {}
    for line in lines:
        value = line.get("value")
        if line["kind"] == "fact" and not _is_missing(value):
            values.setdefault(line["name"], []).append(value)
    return values


def _is_missing(value: object) -> bool:
    """Return True for an error or a sentence in a fact's place."""
    return isinstance(value, str) or (isinstance(value, Mapping) and "error" in value)


def compared(
    lines: Sequence[Line],
    predictions: Mapping[str, Line],
    gpu: Gpu,
) -> list[Comparison]:
    """Return the constants for which the results of a real card hold a value."""
    facts = facts_of(lines)
    values = {
        **memory_values(facts, gpu),
        **rate_values(facts, gpu),
        **load_values(lines),
        **error_values(lines, predictions),
    }
    comparisons = []
    for name, measured in values.items():
        estimate, unit = _constant(name, gpu)
        comparisons.append(
            Comparison(
                name=name,
                unit=unit,
                low=estimate.low,
                value=estimate.value,
                high=estimate.high,
                measured=measured,
            )
        )
    return comparisons


def _constant(name: str, gpu: Gpu) -> tuple[Estimate, str]:
    """Return a constant of either file with its unit; for attention that of the card's kernel."""
    if name == ATTENTION:
        kernel = kernel_of("sdpa", gpu.compute_capability)
        attention = AttentionUse(kernel=kernel, row_tokens=LONG_ROWS)
        share = attention_share(attention, gpu.compute_capability)
        return share, f"of the dense peak, {kernel}, rows of {LONG_ROWS}"
    row_of = catalog.constant if name in catalog.constants() else catalog.efficiency
    constant = row_of(name, gpu.compute_capability)
    return constant, constant.unit


def memory_values(facts: Facts, gpu: Gpu) -> dict[str, float]:
    """Return the constants of memory outside torch, from the steps of one process."""
    values: dict[str, float] = {}
    for steps in facts.get("outside torch", [])[-1:]:
        by_name = {step["step"]: step for step in steps}
        context = _figure(by_name, "initialised", "outside_torch_mib")
        if context is not None and gpu.multiprocessors:
            values["context_mib_per_multiprocessor"] = context / gpu.multiprocessors
        last = _figure(by_name, "sort and multinomial", "outside_torch_mib")
        if context is not None and last is not None:
            values["kernels_mib"] = last - context
        workspace = _figure(by_name, "first bf16 product", "workspace")
        if workspace is not None:
            is_new = float(gpu.compute_capability or 0) >= FIRST_HOPPER
            suffix = "_from_hopper_on" if is_new else ""
            values[f"cublas_workspace_mib{suffix}"] = workspace / MIB
    driver = facts.get("driver memory", ())
    torch = facts.get("torch", ())
    if driver and torch:
        offered = torch[-1]["free_and_total"][1]
        values["driver_reserve_mib"] = (driver[-1]["total"] - offered) / MIB
    return values


def _figure(
    steps: Mapping[str, Line],
    step: str,
    name: str,
) -> float | None:
    figure: float | None = steps.get(step, {}).get(name)
    return figure


def rate_values(facts: Facts, gpu: Gpu) -> dict[str, float]:
    """Return the shares of the data sheet's peaks that kernels reached."""
    peak_tflops = (gpu.tflops or {}).get("bfloat16")
    values: dict[str, float] = {}
    best, training = _product_rates(facts)
    if peak_tflops and best:
        values["best_matmul_share"] = best / peak_tflops
    if best and training:
        values["matmul_share"] = statistics.median(training) / best
    rates = []
    for row in facts.get("rate: attention", ()):
        if row["backend"] == "default" and row["length"] >= LONG_ROWS:
            rates.append(row["tflops_forward"])
    if peak_tflops and rates:
        values[ATTENTION] = statistics.median(rates) / peak_tflops
    for memory in facts.get("rate: memory", [])[-1:]:
        if gpu.bandwidth_gb_per_second:
            values["memory_share"] = memory["copy"] / gpu.bandwidth_gb_per_second
    for launch in facts.get("rate: launches", [])[-1:]:
        values["launch_microseconds"] = launch["linear"]
    return values


def _product_rates(facts: Facts) -> tuple[float, list[float]]:
    """Return the best rate of all products, and those of a 7B model's wide layers."""
    best = 0.0
    training = []
    for name, rows in facts.items():
        if not name.startswith("rate: product"):
            continue
        for row in rows:
            rates = list(row["tflops"].values())
            best = max(best, *rates)
            if name.endswith(WIDE_LAYERS) and row["tokens"] > FEW_TOKENS:
                training += rates
    return best, training


def load_values(lines: Iterable[Line]) -> dict[str, float]:
    """Return seconds of loads without an engine, and what an engine adds to them."""
    without: list[float] = []
    with_engine: list[float] = []
    for line in lines:
        if line["kind"] == "point" and line.get("load_seconds"):
            has_engine = bool(line["knobs"].get("use_vllm"))
            (with_engine if has_engine else without).append(line["load_seconds"])
    values: dict[str, float] = {}
    if without:
        values["worker_start_seconds"] = statistics.median(without)
    if without and with_engine:
        added = statistics.median(with_engine) - statistics.median(without)
        values["engine_start_seconds"] = added
    return values


def error_values(lines: Iterable[Line], predictions: Mapping[str, Line]) -> dict[str, float]:
    """Return the largest error of torch's predicted peak, in percent."""
    errors = []
    for line in lines:
        prediction = predictions.get(line.get("key", ""), {})
        predicted = prediction.get("torch_peak_allocated_bytes")
        if line["kind"] == "point" and line["outcome"] == "ok" and predicted:
            share = predicted["value"] / line["torch_allocated_bytes"]
            errors.append(100 * (share - 1))
    return {"trace_error_percent": max(errors, key=abs)} if errors else {}

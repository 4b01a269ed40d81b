"""Predicted figures of a row next to its published ones, one kind of peak at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import msgspec
from foresight_express import Case

from autotune import catalog
from autotune.core.composition import Composition, Resident
from autotune.core.job import Hardware
from autotune.core.prediction import Prediction
from autotune.core.trace import Trace
from autotune.core.units import GIB, MIB
from autotune.estimate import sharding
from autotune.estimate.predictor import predict
from autotune.estimate.trace_context import PredictionInput


def compare(
    case: Case,
    answer: Mapping[str, Any] | None,
    beside_mib: float = 0,
) -> dict[str, Any]:
    """Return one line of the table. A row that could not be traced states the reason."""
    row = case.row
    line: dict[str, Any] = {
        "id": row["id"],
        "class": case.label,
        "url": row["url"],
        "environment": row["environment"],
        "model": row["model"],
        "gpus": row["gpus"],
        "tuning": row["tuning"],
        "framework_config": row["framework_config"],
        "micro_batch": row["micro_batch"],
    }
    if answer is None or "error" in answer:
        return {**line, "error": (answer or {}).get("error", "not followed")}
    try:
        ranks = predictions(case, msgspec.convert(answer["trace"], Trace))
    except (ValueError, NotImplementedError) as error:
        return {**line, "error": f"{type(error).__name__}: {error}"}
    return {
        **line,
        "trace_seconds": answer["trace"]["seconds"],
        **_kinds(case, ranks, beside_mib * MIB),
    }


def decide(case: Case, answer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the predicted verdict of a row whose run ended out of memory: fits (True), does not
    (False), undecided (None).
    """
    line = {"id": case.row["id"], "outcome": case.row["measured"]["outcome"], "depends_on": []}
    if answer is None or "error" in answer:
        return {
            **line,
            "verdict": None,
            "depends_on": [(answer or {}).get("error", "not followed")],
        }
    peaks = []
    for prediction in predictions(case, msgspec.convert(answer["trace"], Trace)):
        peaks.append(prediction.peak_memory_bytes)
    room = gpu_named(case.row["gpu"]).memory_mib * MIB
    low, high = max(peak.low for peak in peaks), max(peak.high for peak in peaks)
    verdict = None if low <= room < high else high <= room
    figures = f"{low / GIB:.1f} to {high / GIB:.1f} GiB of {room / GIB:.0f}"
    return {**line, "verdict": verdict, "depends_on": [f"{_label(case)}: {figures}"]}


def _label(case: Case) -> str:
    row = case.row
    return (
        f"{row['model'].split('/')[-1]}, {row['gpus']} GPUs, {row['framework_config']},"
        f" {row['micro_batch']} rows"
    )


def predictions(case: Case, trace: Trace) -> list[Prediction]:
    """Return one prediction per rank."""
    return [prediction(case, trace, rank) for rank in range(int(case.row["gpus"]))]


def _kinds(
    case: Case,
    ranks: list[Prediction],
    process_bytes: float,
) -> dict[str, Any]:
    """Return the kinds of peaks. The benchmark read torch on the first rank and averaged nvidia-smi
    over all GPUs.

    `beside`: known bytes of a process on this machine in addition to those of the same kind of
    machine elsewhere.
    """
    measured, allocated = case.row["measured"], ranks[0].torch_peak_allocated_bytes
    other_contexts = catalog.context(gpu_named(case.row["gpu"])).scaled(case.contexts - 1)
    peaks = [prediction.peak_memory_bytes + other_contexts for prediction in ranks]
    low, value, high = (
        fmean(getattr(peak, end) for peak in peaks) for end in ("low", "value", "high")
    )
    process_total = process_bytes * case.contexts
    shown = measured["nvidia_smi_mib"] * MIB
    return {
        "torch_max_allocated": _beside(
            allocated.value, measured["torch_max_allocated_bytes"], allocated.low, allocated.high
        ),
        "nvidia_smi_used": _beside(
            value + process_total, shown, low + process_total, high + process_total
        ),
        "nvidia_smi_used_elsewhere": _beside(value, shown, low, high),
        "torch_max_reserved_predicted": round(
            fmean(prediction.torch_peak_reserved_bytes.value for prediction in ranks)
        ),
    }


def _beside(
    predicted: float,
    measured: float,
    low: float,
    high: float,
) -> dict[str, Any]:
    return {
        "predicted": round(predicted),
        "measured": round(measured),
        "error": round(predicted / measured - 1, 6),
        "within_interval": low <= measured <= high,
    }


def prediction(
    case: Case,
    trace: Trace,
    rank: int,
) -> Prediction:
    """Return the product's own prediction: sharding, replay, device memory."""
    row, spec = case.row, case.specification
    spread = sharding.apply(trace, replace(sharding.Sharding.of(case.sharding), rank=rank))
    gpu = gpu_named(row["gpu"])
    return predict(
        PredictionInput(
            candidate_id=row["id"],
            composition=composition(row, spec),
            hardware=Hardware(
                kind="cuda",
                name=gpu.name,
                count=row["gpus"],
                memory_bytes=gpu.memory_mib * MIB,
                here=False,
            ),
            gpu=gpu,
            limit_bytes=gpu.memory_mib * MIB,
            config=spec["model"]["config"],
            trace=spread.trace,
            settings=spec["settings"],
            host_bytes=spread.host_bytes,
        )
    )


def gpu_named(name: str) -> catalog.Gpu:
    return next(gpu for gpu in catalog.gpus() if gpu.name == name)


def composition(row: Mapping[str, Any], spec: Mapping[str, Any]) -> Composition:
    ranks, settings = row["gpus"], spec["settings"]
    policy = Resident(
        role="policy",
        model=row["model"],
        ranks=tuple(range(ranks)),
        dtype=row["dtype"],
        trains=True,
        adapter_rank=None if row["tuning"] == "full" else 16,
        sharding="parameters" if ranks > 1 else "none",
    )
    return Composition(
        residents=(policy,),
        ranks=ranks,
        micro_batch=row["micro_batch"],
        accumulation=1,
        generation_batch=row["micro_batch"],
        prompt_length=0,
        completion_length=row["length"],
        checkpointing=True,
        optimizer=settings["optim"],
        attention="flash_attention_2",
        sharded_by="fsdp1" if ranks > 1 else "none",
    )

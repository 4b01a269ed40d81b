"""Page of `make first-light`: kinds of figures side by side, and constants that a card contradicts.
Values are worked out by hand from the figures that each test writes down.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from first_light_constants import Comparison, compared, facts_of
from first_light_page import (
    ALLOCATED,
    DEVICE,
    KV,
    Results,
    differences,
    disagreements,
    page,
    read_results,
    write_page,
)

from autotune.core.units import GIB, MIB
from autotune.machine.hardware_detection import gpu_named

Line = dict[str, Any]


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "low": 0.9 * value, "high": 1.1 * value}


def predicted(allocated: float, device: float, **changes: Any) -> Line:
    return {
        "setup": "sft 7B",
        "point": "micro-batch 1",
        "fits": True,
        "torch_peak_allocated_bytes": estimate(allocated),
        "peak_memory_bytes": estimate(device),
        "tokens_per_second": estimate(7000),
        "kv_cache_bytes": None,
        "kv_cache_tokens": None,
        **changes,
    }


def point(basis: str, allocated: float, device: float, **changes: Any) -> Line:
    return {
        "kind": "point",
        "basis": basis,
        "key": "k1",
        "setup": "sft 7B",
        "point": "micro-batch 1",
        "outcome": "ok",
        "fits": True,
        "knobs": {},
        "tokens_per_second": 6543.2,
        "torch_allocated_bytes": allocated,
        "peak_bytes": device,
        "load_seconds": 0,
        **changes,
    }


def results_of(prediction: Line, *points: Line) -> Results:
    results = Results(card="H100", predicted={"k1": prediction})
    for line in points:
        results.lines(line["basis"]).append(line)
    return results


def cells(text: str) -> dict[str, str]:
    """Return the cells of the only point, from all tables."""
    values: dict[str, str] = {}
    columns: list[str] = []
    for line in text.split("## Differences")[0].splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if row[0] == "point":
            columns = _full_names(row)
        elif row[0].startswith("1"):
            values.update(zip(columns, row, strict=True))
    return values


def _full_names(columns: list[str]) -> list[str]:
    names = []
    figure = "outcome"
    for column in columns:
        if ":" in column:
            figure, column = column.split(": ")
        names.append(f"{figure} {column}")
    return names


def test_each_kind_of_figure_has_its_own_column() -> None:
    results = results_of(
        predicted(10 * GIB, 12 * GIB),
        point("emulated", 20 * GIB, 22 * GIB),
        point("measured", 30 * GIB, 32 * GIB),
    )
    row = cells(page(results))
    assert row["torch allocated, GiB predicted"] == "10.00 (9.00 to 11.00)"
    assert row["torch allocated, GiB emulated"] == "20.00"
    assert row["torch allocated, GiB measured"] == "30.00"
    assert row["device, GiB emulated"] == "22.00"
    assert row["device, GiB measured"] == "32.00"
    assert row["tokens/s measured"] == "6543"


def test_without_a_card_nothing_is_called_measured() -> None:
    results = results_of(predicted(10 * GIB, 12 * GIB), point("emulated", 10 * GIB, 12 * GIB))
    text = page(results)
    row = cells(text)
    assert row["torch allocated, GiB measured"] == row["outcome measured"] == "-"
    assert "measured: nothing yet" in text
    assert "cannot contradict" in text


def test_the_peak_of_a_run_out_of_memory_is_no_figure() -> None:
    failed = point("emulated", 39 * GIB, 40 * GIB, outcome="oom_backward", fits=False)
    results = results_of(predicted(10 * GIB, 12 * GIB), failed)
    row = cells(page(results))
    assert row["device, GiB emulated"] == "-"
    assert row["outcome emulated"] == "oom_backward"
    assert differences(results) == []
    (text,) = disagreements(results)
    assert "predicted that it fits" in text
    assert "oom_backward" in text


def test_differences_and_their_bars() -> None:
    """10.2 of 10 is 2 % against a bar of 1 %, and 12.24 of 12 is 2 % against a bar of 3 %."""
    results = results_of(predicted(10.2 * GIB, 12.24 * GIB), point("measured", 10 * GIB, 12 * GIB))
    allocated, device = differences(results)
    assert (allocated.figure, device.figure) == (ALLOCATED, DEVICE)
    assert allocated.share == pytest.approx(0.02)
    assert allocated.is_large
    assert device.share == pytest.approx(0.02)
    assert not device.is_large
    assert "+2.00%: sft 7B, micro-batch 1" in page(results)


def test_an_engines_cache_is_compared_in_tokens() -> None:
    prediction = predicted(
        20 * GIB,
        22 * GIB,
        kv_cache_bytes=estimate(10 * GIB),
        kv_cache_tokens=1000,
    )
    results = results_of(prediction, point("emulated", 20 * GIB, 22 * GIB, kv_cache_tokens=1250))
    shares = {difference.figure: difference.share for difference in differences(results)}
    assert shares == pytest.approx({ALLOCATED: 0, DEVICE: 0, KV: -0.2})


def start(basis: str) -> Line:
    return {
        "kind": "start",
        "basis": basis,
        "card": "H100",
        "driver_name": "NVIDIA H100 80GB HBM3",
        "memory_mib": 81559,
        "driver_version": "580",
        "minutes": 9,
        "scale": 1,
        "machine": {
            "date": "2026-11-26",
            "cpu": "a cpu",
            "cores": 2,
            "versions": {"torch": "2.11.0"},
            "commit": "unknown",
        },
    }


def _write(folder: Path, *lines: Line) -> None:
    folder.mkdir(parents=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_folders_of_one_card_become_one_page(tmp_path: Path) -> None:
    """The last line of a point counts; a later program measured it again."""
    emulated, measured = tmp_path / "emulated" / "H100", tmp_path / "measured" / "H100"
    _write(emulated, start("emulated"), point("emulated", 20 * GIB, 22 * GIB))
    first, second = point("measured", GIB, GIB), point("measured", 30 * GIB, 32 * GIB)
    _write(measured, start("measured"), first, start("measured"), second)
    (measured / "predicted.json").write_text(json.dumps({"k1": predicted(10 * GIB, 12 * GIB)}))

    write_page(measured, [emulated, measured])
    row = cells((measured / "page.md").read_text())
    assert row["device, GiB predicted"].startswith("12.00")
    assert row["device, GiB emulated"] == "22.00"
    assert row["device, GiB measured"] == "32.00"
    assert len(read_results(measured, [emulated]).measured) == 4


def fact(name: str, value: Any) -> Line:
    return {"kind": "fact", "basis": "measured", "name": name, "value": value}


def constants(
    lines: list[Line],
    card: str = "H100",
    predictions: dict[str, Line] | None = None,
) -> dict[str, Comparison]:
    """Return the compared constants by name."""
    comparisons = {}
    for comparison in compared(lines, predictions or {}, gpu_named(card)):
        comparisons[comparison.name] = comparison
    return comparisons


def outside_torch(
    context: float,
    everything: float,
    workspace_mib: float,
) -> Line:
    steps = [
        {"step": "nothing"},
        {"step": "initialised", "outside_torch_mib": context},
        {"step": "first bf16 product", "workspace": workspace_mib * MIB},
        {"step": "sort and multinomial", "outside_torch_mib": everything},
    ]
    return fact("outside torch", steps)


def test_constants_of_memory_outside_torch() -> None:
    """An H100 has 132 multiprocessors: 660 MiB are 5 each, above 4.1; an H200 had 527."""
    lines = [
        outside_torch(
            context=660,
            everything=860,
            workspace_mib=32,
        ),
        fact("driver memory", {"total": 81_559 * MIB}),
        fact("torch", {"free_and_total": [0, 81_059 * MIB]}),
    ]
    by_name = constants(lines)
    context = by_name["context_mib_per_multiprocessor"]
    assert context.measured == pytest.approx(5)
    assert context.contradicted
    kernels = by_name["kernels_mib"]
    assert kernels.measured == pytest.approx(200)
    assert not kernels.contradicted
    assert by_name["cublas_workspace_mib_from_hopper_on"].measured == 32
    assert not by_name["cublas_workspace_mib_from_hopper_on"].contradicted
    assert by_name["driver_reserve_mib"].measured == pytest.approx(500)


def test_an_older_card_has_the_smaller_workspace() -> None:
    lines = [
        outside_torch(
            context=330,
            everything=500,
            workspace_mib=32,
        )
    ]
    by_name = constants(lines, "A100-40G")
    assert by_name["cublas_workspace_mib"].contradicted  # 32 MiB in place of 8.125


def test_constants_of_rates() -> None:
    """H100: 989.5 dense TFLOP/s of bfloat16 and 3350 GB/s."""

    def product(tokens: int, *tflops: float) -> Line:
        rates = dict(zip(("forward", "input gradient", "weight gradient"), tflops, strict=True))
        return {"tokens": tokens, "tflops": rates}

    def attention(
        backend: str,
        length: int,
        tflops: float,
    ) -> Line:
        row = {"backend": backend, "length": length, "tflops_forward": tflops}
        return fact("rate: attention", row)

    lines = [
        fact("rate: product: square", product(16384, 791.6, 700, 700)),
        fact("rate: product: 7b up", product(16384, 712.44, 712.44, 712.44)),
        fact("rate: product: 7b up", product(1024, 1, 1, 1)),  # too few rows to count
        fact("rate: memory", {"copy": 3015.0}),
        fact("rate: memory", {"error": "RuntimeError"}),
        fact("rate: launches", {"linear": 70.0}),
        attention("default", 2048, 197.9),
        attention("default", 1024, 1),
        attention("flash", 4096, 1),
    ]
    by_name = constants(lines)
    assert by_name["best_matmul_share"].measured == pytest.approx(0.8, rel=0.001)
    assert by_name["matmul_share"].measured == pytest.approx(0.9, rel=0.001)
    assert by_name["memory_share"].measured == pytest.approx(0.9)
    assert by_name["attention_share"].measured == pytest.approx(0.2, rel=0.001)
    assert by_name["attention_share"].contradicted  # that of cuDNN on Hopper begins at 0.21
    assert by_name["launch_microseconds"].contradicted  # and ends at 65


def test_constants_of_loads_and_of_traces() -> None:
    """Loads of 20 and 30 s, with an engine 65: it adds 40 s to their median of 25."""
    lines = [
        point("measured", 10 * GIB, 12 * GIB, load_seconds=20),
        point("measured", 10 * GIB, 12 * GIB, key="k2", load_seconds=30),
        point(
            "measured",
            GIB,
            GIB,
            key="k3",
            load_seconds=65,
            knobs={"use_vllm": True},
        ),
    ]
    predictions = {"k1": predicted(10.1 * GIB, GIB), "k2": predicted(9.98 * GIB, GIB)}
    by_name = constants(lines, predictions=predictions)
    assert by_name["worker_start_seconds"].measured == 25
    assert by_name["engine_start_seconds"].measured == 40
    assert by_name["trace_error_percent"].measured == pytest.approx(1.0)
    assert by_name["trace_error_percent"].contradicted  # at most 0.6


def test_contradicted_constants_come_first() -> None:
    results = results_of(predicted(10 * GIB, 12 * GIB), point("measured", 10 * GIB, 12 * GIB))
    results.measured.append(outside_torch(660, 860, 32))
    section = page(results).split("## Constants of the catalogue")[1]
    first = next(line for line in section.splitlines() if line.startswith("| `"))
    assert "context_mib_per_multiprocessor" in first
    assert "**contradicted**" in first


def test_errors_are_no_facts() -> None:
    assert facts_of([fact("torch", {"error": "RuntimeError: no"})]) == {}

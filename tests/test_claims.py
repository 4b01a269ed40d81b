"""The figures of README's tables, recomputed from the committed results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f}%"


def _verdicts(name: str) -> Counter[tuple[str, bool | None]]:
    return Counter((row["outcome"], row["verdict"]) for row in _read(name)["decided"])


def _worst_allocated(name: str) -> float:
    return max(abs(row["torch_max_allocated"]["error"]) for row in _read(name)["rows"])


def _memory() -> Iterator[tuple[str, str]]:
    """Yield a row's beginning and a figure that it must have."""
    reports = _verdicts("foresight")
    right = reports["fit", True] + reports["oom", False]
    undecided = reports["fit", None] + reports["oom", None]
    yield "verdict, GRPO", f"{sum(reports.values())} public reports"
    yield "verdict, GRPO", f"all {right} rightly"
    yield "verdict, GRPO", f"{undecided} undecided"

    refused = _verdicts("foresight-second")
    yield "verdict, fine-tuning", f"{sum(refused.values())} out-of-memory runs"
    yield "verdict, fine-tuning", f"{refused['oom', False]} refused, none called a fit"
    yield "verdict, fine-tuning", f"{refused['oom', None]} undecided"

    first, second = _read("foresight"), _read("foresight-second")
    allocated = first["bars"]["torch_max_allocated"]
    device = first["bars"]["nvidia_smi_used"]
    yield "torch's peak, in sample", f"{allocated['rows']} public A100 runs"
    yield "torch's peak, in sample", f"median error {_percent(allocated['median_found'], 3)}"
    yield "torch's peak, in sample", f"worst {_percent(_worst_allocated('foresight'), 1)}"
    yield "nvidia-smi, in sample", f"median {_percent(device['median_found'], 1)}"
    yield "nvidia-smi, in sample", f"{_percent(device['share_found'], 1)} within 5%"

    allocated = second["bars"]["torch_max_allocated"]
    device = second["bars"]["nvidia_smi_used"]
    worst = _percent(_worst_allocated("foresight-second"), 2)
    yield "torch's peak, three", f"median {_percent(allocated['median_found'], 2)}, worst {worst}"
    yield "nvidia-smi, three", f"median {_percent(device['median_found'], 2)}"
    yield "nvidia-smi, three", f"{_percent(device['share_found'], 1)} within 5%; the bar is 90%"

    cards = _read("fakegpu")["summary"]
    yield "torch's peak, held", f"{cards['compared']} runs"
    yield "torch's peak, held", f"median {_percent(cards['median'], 2)}"
    yield "torch's peak, held", f"worst {_percent(cards['worst'], 1)}"

    emulated = _read("emulated")["bars"]
    phases = emulated["device by phase, vLLM colocated"]
    allocated = emulated["allocated"]
    yield "memory on emulated", f"{allocated['rows']} configurations"
    yield "memory on emulated", f"median difference {_percent(allocated['median'], 2)}"
    yield "memory on emulated", f"{_percent(allocated['share'], 1)} within 1%"
    yield "memory on emulated", f"{_percent(1 - phases['share'], 1)} of the phases"


def _h200(predicted: str) -> list[tuple[str, dict[str, float], bool]]:
    """Return setup, relative errors and whether the speed is in its interval, by point."""
    folder = RESULTS / "first-light" / "H200"
    predictions = json.loads((folder / predicted).read_text())
    figures = {
        "torch_peak_allocated_bytes": "torch_allocated_bytes",
        "peak_memory_bytes": "peak_bytes",
        "tokens_per_second": "tokens_per_second",
    }
    points = []
    for text in (folder / "results.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["kind"] != "point" or line["outcome"] != "ok":
            continue
        prediction = predictions[line["key"]]
        errors = {}
        for figure, measured in figures.items():
            errors[figure] = abs(prediction[figure]["value"] / line[measured] - 1)
        speed = prediction["tokens_per_second"]
        is_inside = speed["low"] <= line["tokens_per_second"] <= speed["high"]
        points.append((line["setup"], errors, is_inside))
    return points


def _own_card() -> Iterator[tuple[str, str]]:
    memory = "memory on our H200"
    first = _h200("predicted.json")
    allocated = [errors["torch_peak_allocated_bytes"] for _, errors, _ in first]
    device = [errors["peak_memory_bytes"] for _, errors, _ in first]
    yield memory, f"{len(first)} points"
    yield memory, f"torch's peak: median {_percent(median(allocated), 2)}"
    yield memory, f"device: median {_percent(median(device), 1)}"
    sft = [errors for setup, errors, _ in first if setup.startswith("sft")]
    worst = max(errors["torch_peak_allocated_bytes"] for errors in sft)
    yield memory, f"SFT at most {_percent(worst, 2)}"
    engines = sorted(set(allocated) - {errors["torch_peak_allocated_bytes"] for errors in sft})
    assert [_percent(error, 1) for error in engines] == ["1.7%", "3.8%", "5.6%"]
    yield memory, "1.7, 3.8 and 5.6%"
    assert len([error for error in device if error > 0.03]) == 3
    yield memory, f"to {_percent(max(device), 1)}"

    mended = _h200("predicted-after-mending.json")
    worst = max(errors["torch_peak_allocated_bytes"] for _, errors, _ in mended)
    yield "the same, mechanisms mended", f"torch's peak at most {_percent(worst, 1)}"
    worst = max(errors["peak_memory_bytes"] for _, errors, _ in mended)
    yield "the same, mechanisms mended", f"device at most {_percent(worst, 1)}"

    speed = [errors["tokens_per_second"] for _, errors, _ in first]
    near = [error for error in speed if error <= 0.25]
    outside = [is_inside for _, _, is_inside in first if not is_inside]
    yield "speed on our H200", f"median error {_percent(median(speed), 0)}"
    yield "speed on our H200", f"{len(near)} within 25%"
    yield "speed on our H200", f"{len(outside)} outside their intervals"
    yield "speed on our H200", f"up to {1 + max(speed):.1f} times"


def _speed() -> Iterator[tuple[str, str]]:
    figures = _read("speed")["figures"]["held_back"]
    order, in_a_job = figures["order"], figures["order_in_a_job"]
    yield "training speed, held", f"{figures['rows']} of 125 A100 runs"
    yield "training speed, held", f"median error {_percent(figures['median'], 1)}"
    yield "training speed, held", f"{order['right']} of {order['pairs']} pairs"
    yield "training speed, held", f"{in_a_job['right']} of {in_a_job['pairs']} |"
    assert figures["within_20_percent"] == 1.0

    cards = _read("cards")["figures"]
    held_back, pairs = cards["held back"], cards["all"]["cards"]
    within = round(held_back["within_25_percent"] * held_back["rows"])
    # Halves are rounded up; the median has four places.
    yield "training speed, other", f"{held_back['rows']} held-back rows"
    yield "training speed, other", f"median error {100 * held_back['median'] + 1e-9:.1f}%"
    yield "training speed, other", f"{within} within 25%, worst {_percent(held_back['worst'], 1)}"
    yield "training speed, other", f"{pairs['right']} of {pairs['pairs']} pairs of cards"
    assert held_back["inside"] == 1.0

    second = _read("speed-second")["figures"]["held_back"]
    order = second["order"]
    share = _percent(order["right"] / order["pairs"], 1)
    median, worst = _percent(second["median"], 1), _percent(second["worst"], 1)
    yield "training speed, three", f"{second['rows']} public A100 runs"
    yield "training speed, three", f"median {median}, worst {worst}"
    yield "training speed, three", f"{order['right']} of {order['pairs']} pairs in order, {share}"


def _search_and_diagnosis() -> Iterator[tuple[str, str]]:
    usual = _read("search")["overall"]["autotune"]
    worse = _read("search-worse")["overall"]["autotune"]
    independent = _read("search-independent")["overall"]
    yield "recommended candidate", f"{usual['studies']} studies"
    yield "recommended candidate", f"mean {_percent(usual['mean_recommended'], 1)} of the optimum"
    yield "recommended candidate", f"mean {_percent(worse['mean_recommended'], 1)}"
    for studies in (usual, worse, independent["autotune"]):
        yield "recommended candidate", _percent(studies["recommended_below_95"], 1)
    for name, text in (("autotune", "mean"), ("predicted order", "in predicted order")):
        mean = independent[name]["mean_recommended"]
        yield "recommended candidate", f"{text} {_percent(mean, 1)}"
    assert usual["out_of_memory"] == 2

    logs, excerpts = (
        _read("diagnose")[name] for name in ("eighth_set_first_run", "eighth_excerpts_first_run")
    )
    yield "cause of a failure | 74", f"{logs['logs']} composed logs"
    yield "cause of a failure | 74", f"{logs['right']} right"
    share = _percent(excerpts["share_named"], 0)
    yield "cause of a failure | 39", f"{excerpts['excerpts']} excerpts"
    yield "cause of a failure | 39", f"{excerpts['named']} right, {share}"

    probes, finalists = (
        _read("intervals")["result"][name] for name in ("probes alone", "finalists")
    )
    yield "intervals of measured", f"{probes['pairs']} probes"
    yield "intervals of measured", f"with one probe {probes['overlapping']} do"
    assert finalists["overlapping"] == finalists["pairs"] == probes["pairs"]


CLAIMS = [*_own_card(), *_memory(), *_speed(), *_search_and_diagnosis()]


@pytest.mark.parametrize(("row", "figure"), CLAIMS)
def test_a_figure_is_that_of_its_committed_file(row: str, figure: str) -> None:
    lines = [line for line in README.splitlines() if line.startswith(f"| {row}")]
    assert len(lines) == 1, row
    plain = lines[0].replace("[", "").replace("]", "")
    assert figure in plain, f"{figure!r} is not in: {plain}"

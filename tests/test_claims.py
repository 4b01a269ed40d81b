"""The figures of README's tables, recomputed from the committed results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
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
    assert usual["out_of_memory"] == 1

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


CLAIMS = [*_memory(), *_speed(), *_search_and_diagnosis()]


@pytest.mark.parametrize(("row", "figure"), CLAIMS)
def test_a_figure_is_that_of_its_committed_file(row: str, figure: str) -> None:
    lines = [line for line in README.splitlines() if line.startswith(f"| {row}")]
    assert len(lines) == 1, row
    plain = lines[0].replace("[", "").replace("]", "")
    assert figure in plain, f"{figure!r} is not in: {plain}"

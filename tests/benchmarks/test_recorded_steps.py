"""A record of torch's memory history becomes a trace; the page states what records have shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "recorded_steps.json"
sys.path.insert(0, str(ROOT / "benchmarks"))

from recorded_trace import trace_of  # noqa: E402

from autotune.core.units import GIB  # noqa: E402

RECORD = """
alloc          1 100 0 load
alloc          2 40 0 forward
alloc          3 100 0 of-autograd
free_requested 2 40 0 of-autograd
free_completed 2 40 0 of-autograd
alloc          4 10 77 optimizer
free_requested 4 10 77 optimizer
alloc          5 200 0 optimizer
free_completed 4 10 77 optimizer
free_requested 3 100 0 optimizer
free_completed 3 100 0 optimizer
segment_free   2 2097152 0 forward
alloc          2 40 0 forward
free_requested 2 40 0 of-autograd
free_completed 2 40 0 of-autograd
alloc          6 8 0 optimizer
alloc          7 40 0 forward
"""
"""Action, address, bytes, stream and phase of each event."""


def events_of(record: str) -> list[list[Any]]:
    events: list[list[Any]] = []
    for line in record.strip().splitlines():
        action, address, size, stream, phase = line.split()
        label = "" if phase == "of-autograd" else phase
        events.append([action, int(address), int(size), int(stream), label])
    return events


def test_a_record_becomes_a_trace() -> None:
    """Two steps of a weight, an activation, a gradient, a state and a buffer of another stream,
    whose block returns after the state is made; the cache is emptied before the second step.
    """
    trace = trace_of({"torch": "2.11.0", "events": events_of(RECORD)})
    assert trace.sizes == (100, 40, 100, 10, 200, 40, 8)  # nothing of the third step
    assert trace.events == (1, 2, 3, -2, 4, -4, 5, -3, 6, -6, 7)
    stays = [(mark.event, mark.phase, mark.step) for mark in trace.marks]
    assert stays == [
        (0, "load", 0),
        (1, "forward", 0),
        (2, "backward", 0),
        (4, "optimizer", 0),
        (8, "forward", 1),
        (9, "backward", 1),
        (10, "optimizer", 1),
    ]
    assert trace.streams == {3: 1}
    assert trace.returns == {3: 5}  # the next allocation after the state
    assert trace.emptied == (5,)
    parts = [trace.part_names[part] for part in trace.parts]
    assert parts[:3] == ["weights", "activations", "gradients"]
    assert parts[4] == "optimizer"
    assert trace.peak_bytes == 100 + 100 + 200  # the gradient is there while the state is made


def test_the_page_states_the_committed_figures() -> None:
    page = " ".join((ROOT / "docs" / "emulated-gpus.md").read_text().split())
    document = json.loads(RESULTS.read_text())
    for name, row in document["rows"].items():
        cells = [name, pair(row["emulated"]), pair(row["replayed"]), f"{row['events']:,}"]
        assert "| " + " | ".join(cells) in page
        assert row["agrees"]["allocated"]
    families = document["families"]
    assert f"The {families['launches']} launches" in page
    assert f"in {families['combinations']} combinations" in page
    assert f"{families['occurring_once']} of these combinations occurred once" in page


def pair(
    peaks: dict[str, int],
) -> str:
    """Allocated and reserved GiB."""
    return f"{peaks['allocated'] / GIB:.2f}, {peaks['reserved'] / GIB:.2f}"


def test_three_recorded_points_give_the_others_of_their_family() -> None:
    surveys = json.loads(RESULTS.read_text())["survey"]
    (survey,) = (survey for survey in surveys if len(survey["points"]) == 3)
    assert survey["exact_formulas"] and len(survey["unseen"]) == 2
    for point in survey["unseen"]:
        for figure, recorded in point["recorded"].items():
            assert abs(point["by_formulas"][figure] / recorded - 1) < 0.001

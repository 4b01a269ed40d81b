"""Results of `make first-light`: one file of JSON lines, to which each result is appended at once.

A line has a `kind`, `start` (machine, versions, date), `step`, `fact`, `point` or `search`, and a
`basis`, measured or emulated. Of two lines with the same name the later one counts. A program that
was ended loses one line at most, and the next one goes on from the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from autotune.core.measurement import Measurement, judge
from autotune.core.plain_data import plain
from autotune.core.prediction import Estimate, Prediction
from autotune.core.space import Candidate

Line = dict[str, Any]
Basis = Literal["measured", "emulated"]

FILE = "results.jsonl"
DONE, FAILED, OUT_OF_TIME = 0, 1, 75
"""Exit codes of a step. The last one: some points are left for the next program."""

NOT_RUN = ("illegal", "failed to start")
"""Outcomes of points that no process has tried."""


def basis_here() -> Basis:
    """Return `emulated` in a process of `autotune rehearse`: its cards compute nothing."""
    return "emulated" if os.environ.get("AUTOTUNE_EMULATED_MACHINE") else "measured"


def read_lines(path: Path) -> list[Line]:
    """Return the complete lines of a file. The last one of a program that was ended may be cut."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


class Record:
    """Lines of a file, which other processes may extend."""

    def __init__(self, path: Path, **head: Any) -> None:
        """Start a file with the values of `head`, if there are any."""
        self._path = path
        if head and not path.exists():
            self.append("start", **head)

    def append(self, kind: str, **values: Any) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        values = {"kind": kind, "basis": basis_here(), **values}
        line = json.dumps(values, default=str) + "\n"
        with self._path.open("a+b") as stream:
            stream.seek(0, os.SEEK_END)
            if stream.tell() and not self._ends_with_newline():
                stream.write(b"\n")  # after a line that was cut
            stream.write(line.encode())
            stream.flush()

    def _ends_with_newline(self) -> bool:
        with self._path.open("rb") as stream:
            stream.seek(-1, os.SEEK_END)
            return stream.read() == b"\n"

    def lines(self, kind: str) -> list[Line]:
        return [line for line in read_lines(self._path) if line["kind"] == kind]

    def row(self, key: str) -> Line | None:
        """Return the point with this key."""
        row = None
        for line in self.lines("point"):
            if line["key"] == key:
                row = line
        return row

    def add(self, row: Line, versions: Mapping[str, str] | None = None) -> None:
        """Append a point."""
        self.append("point", **row, versions=dict(versions or {}))

    def find(self, name: str, value: Any) -> None:
        """Append a result that is no point."""
        self.append("fact", name=name, value=value)


def measured_row(
    key: str,
    setup: str,
    candidate: Candidate,
    measurement: Measurement,
) -> Line:
    """Return the figures of one probe."""
    memory = measurement.memory
    worst = measurement.worst
    effective = measurement.effective
    verdict = judge(measurement)
    complete = plain(measurement)
    complete["memory"].pop("timeline", None)
    complete.pop("printed", None)
    return {
        "key": key,
        "setup": setup,
        "knobs": dict(candidate.knobs),
        "outcome": str(measurement.outcome),
        "fits": verdict.fits,
        "why": verdict.why,
        "tokens_per_second": round(worst.tokens_per_second, 2) if worst else None,
        "peak_bytes": memory.peak_bytes,
        "torch_allocated_bytes": memory.torch_allocated_bytes,
        "torch_reserved_bytes": memory.torch_reserved_bytes,
        "limit_bytes": memory.limit_bytes,
        "engine_share": effective.get("vllm_gpu_memory_utilization"),
        "engine_share_of_device": effective.get("engine_share_of_device"),
        "kv_cache_tokens": effective.get("kv_cache_tokens"),
        "load_seconds": round(measurement.cost.load_seconds, 2),
        "seconds": round(measurement.cost.total_seconds, 2),
        "measurement": complete,
    }


def refused_row(
    key: str,
    setup: str,
    candidate: Candidate,
    why: str,
) -> Line:
    """A point that the framework would refuse."""
    return {**unstarted_row(key, setup, why, candidate), "outcome": "illegal"}


def unstarted_row(
    key: str,
    setup: str,
    why: str,
    candidate: Candidate | None = None,
) -> Line:
    """A point that could not be started; without a candidate a setup that cannot be built."""
    return {
        "key": key,
        "setup": setup,
        "knobs": dict(candidate.knobs) if candidate else {},
        "outcome": "failed to start",
        "fits": False,
        "why": why,
    }


def predicted_figures(prediction: Prediction) -> Line:
    engine = prediction.engine
    return {
        "fits": prediction.fits,
        "basis": prediction.basis,
        "limit_bytes": prediction.limit_bytes,
        "peak_memory_bytes": _interval(prediction.peak_memory_bytes),
        "torch_peak_allocated_bytes": _interval(prediction.torch_peak_allocated_bytes),
        "torch_peak_reserved_bytes": _interval(prediction.torch_peak_reserved_bytes),
        "tokens_per_second": _interval(prediction.tokens_per_second),
        "kv_cache_bytes": _interval(engine.kv_cache_bytes) if engine else None,
        "kv_cache_tokens": engine.kv_cache_tokens if engine else None,
        "versions": dict(prediction.versions),
    }


def _interval(estimate: Estimate | None) -> dict[str, float] | None:
    if estimate is None:
        return None
    return {
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
    }

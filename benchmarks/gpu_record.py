"""Results of one part: a JSON file that is complete after every point and is continued when the
part is started again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from machine import facts

from autotune.core.answer import plain
from autotune.core.measurement import Measurement, judge
from autotune.core.prediction import Estimate, Prediction
from autotune.core.space import Candidate


class Record:
    """Rows by key; measured points are not measured again."""

    def __init__(
        self,
        path: Path,
        *,
        about: str,
        config: Mapping[str, Any],
        gpu: Mapping[str, Any],
        measures: bool = True,
    ) -> None:
        """`measures`: False where predictions are added to what another machine measured."""
        self._path = path
        earlier = json.loads(path.read_text()) if path.exists() else {}
        self.rows: list[dict[str, Any]] = list(earlier.get("rows", []))
        self._head = {"about": about, "config": dict(config), "gpu": dict(gpu)}
        self._extra: dict[str, Any] = dict(earlier.get("found", {}))
        self._versions: dict[str, str] = dict(earlier.get("machine", {}).get("versions", {}))
        self._spent = float(earlier.get("seconds_spent", 0.0))
        self._began = time.monotonic()
        self._unchanged: dict[str, Any] = {}
        if not measures:
            for name in ("about", "config", "gpu", "machine", "seconds_spent"):
                self._unchanged[name] = earlier[name]

    def has(self, key: str) -> bool:
        return self.row(key) is not None

    def row(self, key: str) -> dict[str, Any] | None:
        return next((row for row in self.rows if row["key"] == key), None)

    def add(self, row: dict[str, Any], versions: Mapping[str, str] | None = None) -> None:
        self.rows = [*(old for old in self.rows if old["key"] != row["key"]), row]
        self._versions.update(versions or {})
        self.write()

    def discard(self, key: str) -> None:
        self.rows = [row for row in self.rows if row["key"] != key]

    def find(self, name: str, value: Any) -> None:
        """Record a result that is not a point, such as the recommendation of a search."""
        self._extra[name] = value
        self.write()

    def found(self, name: str) -> Any:
        return self._extra.get(name)

    def write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            **self._head,
            "machine": facts(self._versions),
            "counts": _counts(self.rows),
            "found": self._extra,
            "seconds_spent": round(self._spent + time.monotonic() - self._began, 1),
            "rows": self.rows,
            **self._unchanged,
        }
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.replace(self._path)


def _counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    measured = [row for row in rows if row["outcome"] not in ("illegal", "failed to start")]
    return {
        "points": len(measured),
        "fits": sum(row["fits"] for row in measured),
        "out_of_memory": sum(row["outcome"].startswith("oom_") for row in measured),
        "predicted": sum(row["predicted"] is not None for row in rows),
    }


def measured_row(
    key: str,
    setup: str,
    candidate: Candidate,
    measurement: Measurement,
) -> dict[str, Any]:
    """Return all results of one probe, flat for reading and complete in addition."""
    memory, worst, verdict = measurement.memory, measurement.worst, judge(measurement)
    return {
        "key": key,
        "setup": setup,
        "knobs": dict(candidate.knobs),
        "outcome": str(measurement.outcome),
        "fits": verdict.fits,
        "why": verdict.why,
        "tokens_per_second": round(worst.tokens_per_second, 2) if worst else None,
        "borrowed_seconds": round(worst.borrowed_seconds, 3) if worst else None,
        "peak_bytes": memory.peak_bytes,
        "torch_allocated_bytes": memory.torch_allocated_bytes,
        "torch_reserved_bytes": memory.torch_reserved_bytes,
        "limit_bytes": memory.limit_bytes,
        "seconds": round(measurement.cost.total_seconds, 2),
        "measurement": plain(measurement),
        "predicted": None,
        "predicted_why_not": "not predicted yet",
    }


def refused_row(
    key: str,
    setup: str,
    candidate: Candidate,
    why: str,
) -> dict[str, Any]:
    """A point that the framework would refuse."""
    row = unstarted_row(key, setup, why, candidate.knobs)
    return {**row, "outcome": "illegal", "predicted_why_not": "it is not legal"}


def unstarted_row(
    key: str,
    setup: str,
    why: str,
    knobs: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, Any]:
    """A point that could not be started; without knobs a whole setup that cannot be built."""
    return {
        "key": key,
        "setup": setup,
        "knobs": dict(knobs),
        "outcome": "failed to start",
        "fits": False,
        "why": why,
        "predicted": None,
        "predicted_why_not": "not predicted yet" if knobs else why,
    }


def predicted_figures(prediction: Prediction) -> dict[str, Any]:
    return {
        "fits": prediction.fits,
        "basis": prediction.basis,
        "peak_memory_bytes": _interval(prediction.peak_memory_bytes),
        "torch_peak_allocated_bytes": _interval(prediction.torch_peak_allocated_bytes),
        "torch_peak_reserved_bytes": _interval(prediction.torch_peak_reserved_bytes),
        "tokens_per_second": _interval(prediction.tokens_per_second),
        "versions": dict(prediction.versions),
    }


def _interval(estimate: Estimate | None) -> dict[str, float] | None:
    return (
        None
        if estimate is None
        else {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    )

"""Prediction beside the same configuration on emulated GPUs: `autotune predict --check`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from autotune.core.measurement import Measurement, Outcome
from autotune.core.prediction import Prediction
from autotune.core.units import format_bytes
from autotune.report.line_wrapping import print_line

if TYPE_CHECKING:
    from rich.console import Console


def check_rows(prediction: Prediction, emulated: Measurement) -> list[dict[str, Any]]:
    """Return the figures that both have: predicted and emulated bytes, and the difference as a share
    of the emulated ones."""
    return [
        {"name": name, "predicted_bytes": round(ours), "emulated_bytes": round(theirs), "difference": round(ours / theirs - 1, 6)}
        for name, ours, theirs in _pairs(prediction, emulated)
        if theirs
    ]


def _pairs(prediction: Prediction, emulated: Measurement) -> Iterator[tuple[str, float, float | None]]:
    memory = emulated.memory.on_first(prediction.training_devices)
    for phase in prediction.phases:
        yield f"{phase.name}", phase.peak_bytes.value, memory.phase_peak_bytes.get(phase.name)
    yield "peak", prediction.peak_memory_bytes.value, memory.peak_bytes
    yield "torch allocated", prediction.torch_peak_allocated_bytes.value, memory.torch_allocated_bytes
    yield "torch reserved", prediction.torch_peak_reserved_bytes.value, memory.torch_reserved_bytes


def check_document(prediction: Prediction, emulated: Measurement) -> dict[str, Any]:
    """Return the part `check` of `predict --json`."""
    return {
        "basis": "emulated",
        "outcome": emulated.outcome.value,
        "evidence": emulated.failure.evidence if emulated.failure else None,
        "rows": check_rows(prediction, emulated),
        "caveats": list(emulated.caveats),
    }


def show_check(console: Console, prediction: Prediction, emulated: Measurement) -> None:
    """Print the table, or the error that ended the emulated run, and what narrows its meaning."""
    console.print()
    if emulated.outcome is not Outcome.OK:
        evidence = f": {emulated.failure.evidence}" if emulated.failure and emulated.failure.evidence else ""
        print_line(console, f"emulated {emulated.outcome.value}{evidence}")
    console.print(f"{'':16}{'predicted':>14}{'emulated':>14}{'difference':>12}", highlight=False)
    for row in check_rows(prediction, emulated):
        ours, theirs = format_bytes(row["predicted_bytes"]), format_bytes(row["emulated_bytes"])
        console.print(f"{row['name']:16}{ours:>14}{theirs:>14}{row['difference']:>+12.1%}", highlight=False)
    for caveat in emulated.caveats:
        print_line(console, f"note     {caveat}")

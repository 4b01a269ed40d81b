"""Prediction beside the same configuration on emulated GPUs: `autotune predict --check`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction
from autotune.core.units import format_bytes
from autotune.report.line_wrapping import print_line

if TYPE_CHECKING:
    from rich.console import Console


def check_document(prediction: Prediction, emulated: Measurement) -> dict[str, Any]:
    """Return the part `check` of `predict --json`; a difference is a share of the emulated bytes."""
    memory = emulated.memory.on_first(prediction.training_devices)
    pairs: list[tuple[str, float, float | None]] = [
        *((phase.name, phase.peak_bytes.value, memory.phase_peak_bytes.get(phase.name)) for phase in prediction.phases),
        ("peak", prediction.peak_memory_bytes.value, memory.peak_bytes),
        ("torch allocated", prediction.torch_peak_allocated_bytes.value, memory.torch_allocated_bytes),
        ("torch reserved", prediction.torch_peak_reserved_bytes.value, memory.torch_reserved_bytes),
    ]
    return {
        "basis": "emulated",
        "outcome": emulated.outcome.value,
        "evidence": emulated.failure.evidence if emulated.failure else None,
        "rows": [
            {"name": name, "predicted_bytes": round(one), "emulated_bytes": round(other), "difference": round(one / other - 1, 6)}
            for name, one, other in pairs
            if other
        ],
        "caveats": list(emulated.caveats),
    }


def show_check(console: Console, check: Mapping[str, Any]) -> None:
    """Print the table, or the error that ended the emulated run, and what narrows its meaning."""
    console.print()
    if check["outcome"] != "ok":
        evidence = f": {check['evidence']}" if check["evidence"] else ""
        print_line(console, f"emulated {check['outcome']}{evidence}")
    console.print(f"{'':16}{'predicted':>14}{'emulated':>14}{'difference':>12}", highlight=False)
    for row in check["rows"]:
        ours, theirs = format_bytes(row["predicted_bytes"]), format_bytes(row["emulated_bytes"])
        console.print(f"{row['name']:16}{ours:>14}{theirs:>14}{row['difference']:>+12.1%}", highlight=False)
    for caveat in check["caveats"]:
        print_line(console, f"note     {caveat}")

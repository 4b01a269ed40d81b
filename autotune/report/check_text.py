"""Part `check` of `predict --check`: predicted and emulated figures side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction
from autotune.core.units import format_bytes
from autotune.report.job_text import print_line

if TYPE_CHECKING:
    from autotune.report.text_console import TextConsole


def check_document(prediction: Prediction, emulated: Measurement) -> dict[str, Any]:
    """Return the part `check` of `predict --json`; a difference is a share of the emulated
    bytes.
    """
    memory = emulated.memory.on_first(prediction.training_devices)
    pairs: list[tuple[str, float, float | None]] = []
    for phase in prediction.phases:
        emulated_peak = memory.phase_peak_bytes.get(phase.name)
        pairs.append((phase.name, phase.peak_bytes.value, emulated_peak))
    allocated = prediction.torch_peak_allocated_bytes.value
    reserved = prediction.torch_peak_reserved_bytes.value
    pairs += [
        ("peak", prediction.peak_memory_bytes.value, memory.peak_bytes),
        ("torch allocated", allocated, memory.torch_allocated_bytes),
        ("torch reserved", reserved, memory.torch_reserved_bytes),
    ]
    rows = []
    for name, predicted_bytes, emulated_bytes in pairs:
        if emulated_bytes:
            rows.append(
                {
                    "name": name,
                    "predicted_bytes": round(predicted_bytes),
                    "emulated_bytes": round(emulated_bytes),
                    "difference": round(predicted_bytes / emulated_bytes - 1, 6),
                }
            )
    return {
        "basis": "emulated",
        "outcome": emulated.outcome.value,
        "evidence": emulated.failure.evidence if emulated.failure else None,
        "rows": rows,
        "caveats": list(emulated.caveats),
    }


def show_check(console: TextConsole, check: Mapping[str, Any]) -> None:
    """Print the table, or the error that ended the emulated run, and what narrows its meaning."""
    console.print()
    if check["outcome"] != "ok":
        evidence = f": {check['evidence']}" if check["evidence"] else ""
        print_line(console, f"emulated {check['outcome']}{evidence}")
    console.print(f"{'':16}{'predicted':>14}{'emulated':>14}{'difference':>12}")
    for row in check["rows"]:
        predicted = format_bytes(row["predicted_bytes"])
        emulated = format_bytes(row["emulated_bytes"])
        console.print(
            f"{row['name']:16}{predicted:>14}{emulated:>14}{row['difference']:>+12.1%}",
        )
    for caveat in check["caveats"]:
        print_line(console, f"note     {caveat}")

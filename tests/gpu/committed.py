"""Files that `benchmarks/gpu.py` wrote on a machine with a GPU, and what each says it measured."""

from __future__ import annotations

from typing import Any

NOT_MEASURED = ("illegal", "failed to start")
Document = dict[str, Any]
Row = dict[str, Any]


def complaints(document: Document) -> list[str]:
    """Return the ways in which a file differs from what it says it holds: its counts, and the
    setups of its configuration, of which only a spent time limit may leave some out.
    """
    texts = []
    rows = document["rows"]
    measured = [row for row in rows if row["outcome"] not in NOT_MEASURED]
    points = document["counts"]["points"]
    if not measured or points != len(measured):
        texts.append(f"{points} points are counted, and {len(measured)} rows were measured")
    if not _time_was_spent(document):
        for name in _planned_setups(document):
            if not any(row["setup"] == name for row in rows):
                texts.append(f"no row of {name}, although time was left")
    return texts


def comparable(document: Document, *, with_engine: bool) -> list[Row]:
    """Return the rows that ended well and have a prediction: only there both figures cover a
    whole step.
    """
    rows = []
    for row in document["rows"]:
        has_engine = "use_vllm=true" in row["setup"]
        if row["outcome"] == "ok" and row["predicted"] and with_engine >= has_engine:
            rows.append(row)
    return rows


def _time_was_spent(document: Document) -> bool:
    minutes = document["config"].get("minutes")
    return minutes is not None and document["seconds_spent"] >= 60 * minutes


def _planned_setups(document: Document) -> list[str]:
    """Return the names of the planned setups, formed like those of its rows."""
    names = []
    for setup in document["config"].get("setups", []):
        model = setup["model"].rsplit("/", 1)[-1]
        names.append(" ".join([model, setup["tuning"], setup["limit"], *setup["holds"]]))
    return names

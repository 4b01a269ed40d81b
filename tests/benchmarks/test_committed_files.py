"""Each file of measurements is judged by what it says it measured, not by a count of its own."""

from __future__ import annotations

from typing import Any

from tests.gpu.committed import complaints

PLANNED = ({"model": "Qwen2.5-7B", "tuning": "lora", "limit": "50%", "holds": ["use_vllm=false"]},)
MEASURED = "Qwen2.5-7B lora 50% use_vllm=false"


def document(
    *setups: str,
    points: int,
    seconds_spent: float,
) -> dict[str, Any]:
    """Return a file of ten minutes, with one row for each of these names."""
    return {
        "config": {"setups": PLANNED, "minutes": 10},
        "counts": {"points": points},
        "seconds_spent": seconds_spent,
        "rows": [{"setup": name, "outcome": "ok"} for name in setups],
    }


def test_a_small_file_is_good() -> None:
    assert complaints(document(MEASURED, points=1, seconds_spent=30)) == []


def test_a_planned_setup_is_missing_unless_the_time_was_spent() -> None:
    (missing,) = complaints(document("other", points=1, seconds_spent=30))
    assert MEASURED in missing
    assert complaints(document("other", points=1, seconds_spent=600)) == []


def test_wrong_counts_and_empty_files_are_named() -> None:
    assert len(complaints(document(MEASURED, points=40, seconds_spent=600))) == 1
    assert len(complaints(document(points=0, seconds_spent=600))) == 1

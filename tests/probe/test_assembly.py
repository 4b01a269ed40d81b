"""Activity of several ranks, merged: never more than the least of them."""

from __future__ import annotations

from typing import Any

from autotune.core.measurement import CycleMemory, LoopActivity, ModelMemory
from autotune.probe.assembly import activity_of, merge_speeds, models_of
from autotune.probe.message_validation import RankResult, rank_result
from autotune.probe.root_failure import PRINTED_CHARACTERS, end_of

FIRST: dict[str, Any] = {
    "optimizer_steps": 4,
    "generations": 4,
    "borrowed_generations": 0,
    "weight_syncs": 4,
    "sleeps": None,
    "wakes": None,
    "checkpoint_saves": 1,
    "evaluations": None,
    "shortest_prompt": 64,
    "longest_prompt": 64,
    "shortest_completion": 128,
    "longest_completion": 128,
    "seconds": 3.0,
    "cycles": [
        {"steps": 1, "seconds": 1.0, "peak_bytes": 10, "held_bytes": 5},
        {"steps": 2, "seconds": 2.0, "peak_bytes": 12, "held_bytes": 6},
    ],
}


def reported(**result: Any) -> RankResult:
    return rank_result({"event": "measured", "result": result})


def test_one_rank_is_reported_unchanged() -> None:
    merged = activity_of([reported(exercised=FIRST)])
    assert merged == LoopActivity(
        optimizer_steps=4,
        generations=4,
        weight_syncs=4,
        checkpoint_saves=1,
        shortest_prompt=64,
        longest_prompt=64,
        shortest_completion=128,
        longest_completion=128,
        seconds=3.0,
        cycles=(
            CycleMemory(
                steps=1,
                seconds=1.0,
                peak_bytes=10,
                held_bytes=5,
            ),
            CycleMemory(
                steps=2,
                seconds=2.0,
                peak_bytes=12,
                held_bytes=6,
            ),
        ),
    )


def test_several_ranks_give_the_least_counts_and_the_worst_peak() -> None:
    second_rank = {
        **FIRST,
        "checkpoint_saves": 0,
        "shortest_completion": 100,
        "seconds": 4.0,
        "cycles": [{"steps": 1, "seconds": 1.5, "peak_bytes": 30, "held_bytes": 1}],
    }
    merged = activity_of([reported(exercised=FIRST), reported(exercised=second_rank)])
    assert merged is not None
    assert (merged.checkpoint_saves, merged.shortest_completion, merged.seconds) == (0, 100, 4.0)
    assert merged.cycles == (
        CycleMemory(
            steps=1,
            seconds=1.5,
            peak_bytes=30,
            held_bytes=5,
        ),
    )


def test_no_report_is_unknown() -> None:
    assert activity_of([reported(), reported(exercised=None)]) is None


def test_model_memory_is_listed_by_rank() -> None:
    results = {
        1: reported(model_bytes={"weights": 7}),
        0: reported(model_bytes={"weights": 5, "reference_weights": 5}),
        2: reported(),
    }
    assert models_of(results) == (
        ModelMemory(rank=0, bytes={"weights": 5, "reference_weights": 5}),
        ModelMemory(rank=1, bytes={"weights": 7}),
    )


def test_reused_rollouts_are_reported() -> None:
    speed = {
        "completion_tokens": 8,
        "cycle_seconds": [2.0],
        "cycle_loss_tokens": [16],
        "prompt_tokens": 4,
        "borrowed_seconds": 1.5,
    }
    merged = merge_speeds([reported(worst=speed).worst])
    assert merged is not None
    assert merged.borrowed_seconds == 1.5


def test_an_excerpt_begins_with_a_whole_line() -> None:
    lines = [f"line {number} of a log that is too long to be kept" for number in range(500)]
    remaining = end_of("\n".join(lines))
    assert (
        len(remaining) <= PRINTED_CHARACTERS
        and remaining.splitlines() == lines[-len(remaining.splitlines()) :]
    )
    assert end_of("short\n") == "short\n"
    assert end_of("x" * 10_000) == "x" * PRINTED_CHARACTERS

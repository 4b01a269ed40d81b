"""Directions of a knob after a failure: opposite ones for failures with similar messages."""

from __future__ import annotations

import pytest

from autotune.failures.remedy_table import BY_CAUSE, BY_ROW, directions_after
from autotune.failures.table import (
    CAUSES,
    FAILURE_ROWS,
    KNOWN_WARNINGS,
    MEMORY_CAUSES,
    QUOTED_ROWS,
    warning_in,
)

SHARE = "vllm_gpu_memory_utilization"


@pytest.mark.parametrize(
    ("cause", "row", "knob", "way"),
    [
        ("kv_cache", "vllm_no_cache_blocks", SHARE, "raise"),
        ("kv_cache", "vllm_kv_too_small", SHARE, "raise"),
        ("kv_cache", "vllm_kv_too_small", "vllm_max_model_length", "lower"),
        ("kv_cache", "vllm_kv_too_small_old", SHARE, "raise"),
        ("engine_startup", "vllm_reservation", SHARE, "lower"),
        ("engine_startup", "vllm_sampler_warmup", SHARE, "lower"),
        ("weight_sync", "vllm_wake_up", SHARE, "lower"),
        ("kv_cache", "cuda_out_of_memory", SHARE, "lower"),
        ("activations", "cuda_out_of_memory", "per_device_train_batch_size", "lower"),
        ("activations", "cuda_out_of_memory", "gradient_checkpointing", "on"),
        ("logits", None, "per_device_train_batch_size", "lower"),
        ("zero_gather", None, "ds3_gather_for_generation", "off"),
    ],
)
def test_the_knob_moves_this_way(
    cause: str,
    row: str | None,
    knob: str,
    way: str,
) -> None:
    assert directions_after(cause, row)[knob] == way


def test_what_is_no_lack_of_memory_moves_no_memory_knob() -> None:
    settings = {
        SHARE,
        "per_device_train_batch_size",
        "max_completion_length",
        "gradient_checkpointing",
        "num_generations",
    }
    for row in FAILURE_ROWS:
        if row.kind == "other" and row.cause is not None:
            assert not settings & set(directions_after(row.cause, row.name)), row.name


def test_remedies_are_for_rows_and_causes_that_exist() -> None:
    assert set(BY_CAUSE) == set(CAUSES)
    assert set(BY_ROW) <= {row.name for row in (*FAILURE_ROWS, *QUOTED_ROWS)}
    assert all(
        row.cause in MEMORY_CAUSES
        for row in FAILURE_ROWS
        if row.kind in ("memory", "host_memory") and row.cause is not None
    )


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            (
                "WARNING 11-20 18:14:11 [scheduler.py:1] Sequence group 3 is preempted by"
                " PreemptionMode.RECOMPUTE"
            ),
            "vllm_preempted",
        ),
        (
            "We will change the batch size of 1 to the `num_generations` of 8",
            "unsloth_batch_changed",
        ),
        (
            "Unsloth: Standby mode is enabled. Changing `gpu_memory_utilization` to 0.8.",
            "unsloth_share_changed",
        ),
    ],
)
def test_a_training_that_goes_on_is_remarked_on(line: str, name: str) -> None:
    assert warning_in(line) == next(remark.says for remark in KNOWN_WARNINGS if remark.name == name)


def test_an_ordinary_line_is_no_remark() -> None:
    assert warning_in("{'loss': 0.1, 'reward': 0.2}") is None

"""Two real ranks over gloo, with torch's FSDP2, DDP and FSDP1 and with DeepSpeed: each rank's peak
against its prediction.

Small batches on purpose: where activations are few, what sharding holds is what counts.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.counted_memory import counting, two_ranks

TINY = {"batch": 1, "length": 8}
SHORT_OF_ROOM = {
    "reduce_bucket_size": 200_000,
    "stage3_param_persistence_threshold": 1000,
    "stage3_prefetch_bucket_size": 100_000,
    "stage3_max_live_parameters": 500_000,
    "stage3_max_reuse_distance": 0,
}
AHEAD = {
    "reduce_bucket_size": 200_000,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 400_000,
    "stage3_max_reuse_distance": 300_000,
    "sub_group_size": 200_000,
}

CASES: dict[str, dict[str, Any]] = {
    "fsdp2": {"kind": "fsdp2", **TINY},
    "fsdp2-mixed-clipped": {"kind": "fsdp2", **TINY, "bf16": True, "clip": True},
    "fsdp2-checkpointed": {
        "kind": "fsdp2",
        "bf16": True,
        "dtype": "bfloat16",
        "checkpointing": True,
        "micro_steps": 2,
    },
    "fsdp2-held-back": {
        "kind": "fsdp2",
        **TINY,
        "bf16": True,
        "checkpointing": True,
        "micro_steps": 2,
        "hold_back": True,
    },
    "fsdp2-lora-tied": {"kind": "fsdp2", **TINY, "bf16": True, "lora_r": 32, "tied": True},
    "fsdp2-odd-kept": {
        "kind": "fsdp2",
        **TINY,
        "shape": {"vocab_size": 2051, "intermediate_size": 449},
        "options": {"reshard_after_forward": False},
    },
    "zero1-accumulating": {
        "kind": "zero1",
        **TINY,
        "bf16": True,
        "micro_steps": 2,
        "options": {"reduce_bucket_size": 200_000},
    },
    "zero2": {"kind": "zero2", **TINY, "bf16": True, "options": {"reduce_bucket_size": 500_000}},
    "zero2-checkpointed": {
        "kind": "zero2",
        "bf16": True,
        "checkpointing": True,
        "micro_steps": 2,
        "clip": True,
        "options": {"reduce_bucket_size": 300_000, "overlap_comm": True},
    },
    "zero1-norms-apart": {
        "kind": "zero1",
        **TINY,
        "bf16": True,
        "spares_norms": True,
        "options": {"reduce_bucket_size": 200_000},
    },
    "zero2-norms-apart": {
        "kind": "zero2",
        **TINY,
        "bf16": True,
        "spares_norms": True,
        "options": {"reduce_bucket_size": 500_000},
    },
    "zero2-lora": {
        "kind": "zero2",
        "bf16": True,
        "lora_r": 32,
        "options": {"reduce_bucket_size": 100_000},
    },
    "zero3": {"kind": "zero3", **TINY, "bf16": True, "options": SHORT_OF_ROOM},
    "zero3-ahead": {"kind": "zero3", **TINY, "bf16": True, "micro_steps": 3, "options": AHEAD},
    "zero3-lora": {
        "kind": "zero3",
        "bf16": True,
        "lora_r": 32,
        "checkpointing": True,
        "options": SHORT_OF_ROOM,
    },
    "zero3-lora-ahead": {
        "kind": "zero3",
        "bf16": True,
        "lora_r": 32,
        "checkpointing": True,
        "micro_steps": 3,
        "options": AHEAD,
    },
    "zero3-lora-ahead-tiny": {
        "kind": "zero3",
        **TINY,
        "bf16": True,
        "lora_r": 32,
        "checkpointing": True,
        "micro_steps": 3,
        "options": AHEAD,
    },
    # TRL's checkpointing of adapters under ZeRO-3: each layer runs again inside a backward pass of
    # its own.
    "zero3-lora-reentrant": {
        "kind": "zero3",
        "bf16": True,
        "lora_r": 32,
        "checkpointing": True,
        "reentrant": True,
        "options": SHORT_OF_ROOM,
    },
    "zero3-lora-reentrant-ahead": {
        "kind": "zero3",
        "bf16": True,
        "lora_r": 32,
        "checkpointing": True,
        "reentrant": True,
        "micro_steps": 3,
        "options": AHEAD,
    },
    "zero3-float32": {"kind": "zero3", **TINY, "options": SHORT_OF_ROOM},
    "ddp": {"kind": "ddp", **TINY, "micro_steps": 2},
    "fsdp1": {"kind": "fsdp1", **TINY},
    "fsdp1-mixed": {"kind": "fsdp1", **TINY, "bf16": True, "options": {"mixed_precision": "bf16"}},
    "fsdp1-checkpointed": {
        "kind": "fsdp1",
        **TINY,
        "dtype": "bfloat16",
        "checkpointing": True,
        "micro_steps": 2,
        "clip": True,
    },
}

IN_EVERY_RUN = (
    "fsdp2-lora-tied",
    "zero2-checkpointed",
    "zero3-lora-ahead",
    "fsdp1-mixed",
)
"""One of each kind of sharding; the others are in `make test-long`. ZeRO-1 is the code of ZeRO-2,
and DDP has none of its own.
"""

PEAK = 0.01
"""Largest relative error of a rank's peak."""

PHASE = 0.03
"""Largest relative error of each phase of the second step: in these small cases any phase can
have the peak.
"""

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    return [needs_deepspeed] * name.startswith("zero") + [pytest.mark.long] * (
        name not in IN_EVERY_RUN
    )


@pytest.mark.slow
@pytest.mark.usefixtures("light_environment")
@pytest.mark.skipif(counting.WITHOUT_COMPILER is not None, reason=str(counting.WITHOUT_COMPILER))
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CASES])
def test_each_ranks_peak_matches_the_prediction(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = CASES[name]
    measured = two_ranks.on_real_ranks(case, tmp_path)
    for rank, real in enumerate(measured):
        expected = two_ranks.peaks(two_ranks.predicted(case, rank))
        off = {phase: expected[phase] / real[phase] - 1 for phase in real if phase.endswith("1")}
        over_all = max(expected.values()) / max(real.values()) - 1
        with capsys.disabled():
            print(
                f"\n{name} rank {rank}: {over_all:+.3%}",
                {phase: f"{error:+.2%}" for phase, error in off.items()},
                end="",
            )
        assert abs(over_all) <= PEAK, (expected, real)
        assert all(abs(error) <= PHASE for error in off.values()), (expected, real)

"""Real failures of vLLM, TRL, DeepSpeed and two gloo ranks, provoked again on this machine."""

from __future__ import annotations

import pytest

from autotune.diagnosis import diagnose
from tests.diagnosis.provoke.run import make
from tests.diagnosis.test_corpus import BY_NAME

AGAIN = (
    "engine-share-too-high",
    "engine-share-too-low",
    "engine-cache-too-small",
    "engine-positions",
    "engine-tensor-parallel-heads",
    "engine-quantization-unknown",
    "engine-prompt-too-long",
    "ranks-memory-error",
    "ranks-timeout",
    "ranks-one-leaves",
    "zero2-oom-optimizer",
    "grpo-oom-backward",
    "trl-batch-not-divisible",
    "data-roles",
    "clean-ranks",
)
"""Scripts that need no more than the test environment: no root, no kernel limits, no other
frameworks.
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", AGAIN)
def test_a_failure_provoked_anew_is_named_the_same(name: str) -> None:
    label = BY_NAME[name]
    diagnosis = diagnose(make(label))
    assert (diagnosis.cause, diagnosis.is_memory) == (label["cause"], label["is_memory"]), diagnosis
    for fact in ("phase", "rank"):
        assert fact not in label or getattr(diagnosis, fact) == label[fact], diagnosis


@pytest.mark.slow
def test_the_engines_own_numbers_come_along() -> None:
    too_much = diagnose(make(BY_NAME["engine-share-too-high"])).numbers
    assert too_much["asked_share"] == 0.999 and 0 < too_much["free_share"] < 0.999
    assert (
        too_much["asked_bytes"] <= too_much["total_bytes"]
        and too_much["free_bytes"] < too_much["total_bytes"]
    )
    too_small = diagnose(make(BY_NAME["engine-cache-too-small"])).numbers
    assert too_small["asked_length"] == 4096 and 0 < too_small["longest_length"] < 4096
    too_long = diagnose(make(BY_NAME["engine-positions"])).numbers
    assert too_long["asked_length"] == 100000 and too_long["longest_length"] == 4096

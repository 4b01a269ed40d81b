"""Real failures of vLLM, TRL, DeepSpeed and two gloo ranks, provoked again on this machine."""

from __future__ import annotations

import functools

import pytest

from autotune.diagnosis import Diagnosis, diagnose
from tests.diagnosis.provoke.run import make
from tests.diagnosis.test_corpus import BY_NAME

IN_EVERY_RUN = (
    "engine-share-too-high",
    "ranks-memory-error",
    "ranks-timeout",
    "ranks-one-leaves",
    "grpo-oom-backward",
    "trl-batch-not-divisible",
    "data-roles",
    "clean-ranks",
)
OF_A_NEW_RELEASE = (
    "engine-cache-too-small",
    "engine-positions",
    "engine-share-too-low",
    "engine-tensor-parallel-heads",
    "engine-quantization-unknown",
    "engine-prompt-too-long",
    "zero2-oom-optimizer",
)
"""Further messages, which only a new release of their package can change: `make test-long` and
`make test-release`.

All scripts need no more than the test environment: no root, no kernel limits, no other frameworks.
"""
AGAIN = [
    *IN_EVERY_RUN,
    *[pytest.param(name, marks=pytest.mark.long) for name in OF_A_NEW_RELEASE],
]


@functools.cache
def diagnosed(name: str) -> Diagnosis:
    """Provoke a failure, once for all tests."""
    return diagnose(make(BY_NAME[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", AGAIN)
def test_a_failure_provoked_anew_is_named_the_same(name: str) -> None:
    label = BY_NAME[name]
    diagnosis = diagnosed(name)
    assert (diagnosis.cause, diagnosis.is_memory) == (label["cause"], label["is_memory"]), diagnosis
    for fact in ("phase", "rank"):
        assert fact not in label or getattr(diagnosis, fact) == label[fact], diagnosis


@pytest.mark.slow
def test_the_engines_own_numbers_come_along() -> None:
    too_much = diagnosed("engine-share-too-high").numbers
    assert too_much["asked_share"] == 0.999 and 0 < too_much["free_share"] < 0.999
    assert (
        too_much["asked_bytes"] <= too_much["total_bytes"]
        and too_much["free_bytes"] < too_much["total_bytes"]
    )


@pytest.mark.slow
@pytest.mark.long
def test_the_engines_lengths_come_along() -> None:
    too_small = diagnosed("engine-cache-too-small").numbers
    assert too_small["asked_length"] == 4096 and 0 < too_small["longest_length"] < 4096
    too_long = diagnosed("engine-positions").numbers
    assert too_long["asked_length"] == 100000 and too_long["longest_length"] == 4096

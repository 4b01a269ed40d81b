"""Measurements by an executor, as a search makes them, and the steps of the toy script."""

from __future__ import annotations

from typing import Any

from autotune.core.measurement import Measurement
from autotune.core.space import Candidate
from autotune.probe.executors.base import Executor
from tests.probe.toys import plan


def measured(
    executor: Executor,
    candidate: Candidate,
    seconds: float = 20.0,
    slot: int = 0,
) -> Measurement:
    """Load and measure a candidate in a slot, with a deadline."""
    return executor.open(candidate, slot).measure(candidate, plan(seconds))


def phase(name: str) -> dict[str, Any]:
    return {"do": "phase", "name": name}


def hold(mib: int, **details: Any) -> dict[str, Any]:
    """Keep memory until the end of the probe, on every rank or on the one in the details."""
    return {"do": "hold", "mib": mib, **details}


def sleep(seconds: float, **details: Any) -> dict[str, Any]:
    return {"do": "sleep", "seconds": seconds, **details}

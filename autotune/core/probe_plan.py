"""Probe plan: the part of the training loop that one probe runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProbePlan:
    """Number of steps and cycles of one probe, and its stop rules."""

    optimizer_steps: int = 2  # minimum: Adam's state appears after the first step
    warmup_cycles: int = 1  # generation cycles before the timing
    timed_cycles: int = 3
    save_checkpoint: bool = False  # save one checkpoint into scratch, to measure its memory
    evaluate: bool = False  # one batch at the longest lengths, if configured
    soak_seconds: float | None = None  # run whole cycles for this long instead of `timed_cycles`
    reuse_rollouts: bool = False  # of an earlier candidate with the same generation batch
    deadline_seconds: float = 600.0  # wall seconds until the probe is terminated from outside
    stop_below_tokens_per_second: float | None = None  # stop early if the candidate cannot reach this
    cycle_spread: float = 0.05  # minimum relative standard deviation, for the stop rule

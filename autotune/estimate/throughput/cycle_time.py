"""Repetitions of the traced work in one generation cycle."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.composition import Composition
from autotune.core.measurement import Phase
from autotune.core.trace import Trace

BATCH_PHASES: frozenset[Phase] = frozenset({"rollout", "reward", "score", "sync"})  # once per batch of completions


@dataclass(frozen=True, kw_only=True)
class CycleTime:
    """Repetitions of the traced work in one cycle."""

    micro_steps: int  # per rank
    optimizer_steps: int
    traced_micro_steps: int  # of the optimizer step whose work was counted
    scored: float  # repetitions of the counted scoring


def counted(trace: Trace, composition: Composition, *, iterations: int = 1) -> CycleTime:
    """Return the repetitions. Without completions, a cycle is one optimizer step."""
    micro_steps = composition.accumulation
    if composition.generation != "none":
        micro_steps = iterations * max(1, composition.generation_batch // (composition.ranks * composition.micro_batch))
    traced, whole_batches = traced_micro_steps(trace), 0
    if trace.basis == "traced" and composition.generation != "none":  # runs of `BATCH_PHASES` in the last traced step
        making = [phase in BATCH_PHASES for phase in trace.last_step]
        whole_batches = sum(1 for before, now in zip([False, *making], making, strict=False) if now and not before)
    return CycleTime(
        micro_steps=micro_steps,
        optimizer_steps=max(1, micro_steps // composition.accumulation),
        traced_micro_steps=traced,
        scored=1 / whole_batches if whole_batches else micro_steps / traced / iterations,
    )


def traced_micro_steps(trace: Trace) -> int:
    """Backward passes in the last traced step."""
    phases = trace.last_step
    return max(1, sum(1 for before, now in zip(["load", *phases], phases, strict=False) if now == "backward" != before))

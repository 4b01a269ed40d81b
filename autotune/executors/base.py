"""Where probes run: `executor.open(candidate, slot) -> rig; rig.measure(candidate, plan) -> Measurement; rig.close()`.

A rig is lazy: it loads at the first `measure`, so a load that fails is the measurement of the
candidate that asked for it, and a rig whose process was lost loads again at the next.

An executor has slots, in each of which one rig lives. Slots share nothing that a probe needs, so each may
be used from a thread of its own; an executor with one slot is the sequential case, and nothing more is said about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from autotune.candidate import Candidate
from autotune.measurement import Measurement
from autotune.trainers.base import ProbePlan


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Room for one rig."""

    number: int
    """From 0; what `open` takes."""

    hosts: frozenset[str]
    """The machines it is on: probes that share one disturb each other."""

    words: str
    """What it has, for people: `GPUs 0, 1`, `cores 0-3 of node-a`."""


class Rig(Protocol):
    """One loaded model and engine, on which candidates with the same load_key are measured one after another."""

    load_key: str

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        """The facts about one candidate. Failures of the candidate are measurements; RigError is for faults of the machine,
        SlotLost for a slot that is gone with it."""
        ...

    def close(self) -> None:
        """End every process of the rig. May be called twice, from a signal handler too."""
        ...


class Executor(Protocol):
    """Owner of the slots in which rigs live."""

    def prepare(self) -> Mapping[str, str]:
        """Have the slots, and see what is installed there: versions by package. BadInput and TrainingEnvironmentError where it
        will not do. May be called twice."""
        ...

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What `prepare` found; at least one."""
        ...

    def open(self, candidate: Candidate, slot: int = 0) -> Rig:
        """The slot's live rig for this candidate's load_key, or a fresh one in its place."""
        ...

    @property
    def loads(self) -> int:
        """How many times a model was loaded so far, over all slots."""
        ...

    def interrupt(self) -> None:
        """From any thread: whatever measures ends at once, with RigError, and nothing is measured until `close`."""
        ...

    def close(self) -> None:
        """End every rig. May be called twice; afterwards `open` works again."""
        ...

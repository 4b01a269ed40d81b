"""Where probes run: `executor.open(candidate) -> rig; rig.measure(candidate, plan) -> Measurement; rig.close()`.

A rig is lazy: it loads at the first `measure`, so a load that fails is the measurement of the
candidate that asked for it, and a rig whose process was lost loads again at the next.
"""

from __future__ import annotations

from typing import Protocol

from autotune.candidate import Candidate
from autotune.measurement import Measurement
from autotune.trainers.base import ProbePlan


class Rig(Protocol):
    """One loaded model and engine, on which candidates with the same load_key are measured one after another."""

    load_key: str

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        """The facts about one candidate. Failures of the candidate are measurements; RigError is for faults of the machine."""
        ...

    def close(self) -> None:
        """End every process of the rig. May be called twice, from a signal handler too."""
        ...


class Executor(Protocol):
    """Owner of the slots in which rigs live."""

    def open(self, candidate: Candidate) -> Rig:
        """The live rig for this candidate's load_key, or a fresh one in its place."""
        ...

    @property
    def loads(self) -> int:
        """How many times a model was loaded so far."""
        ...

    def close(self) -> None:
        """End every rig. May be called twice."""
        ...

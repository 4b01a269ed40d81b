"""Interfaces: `executor.open(candidate, slot)` -> runner, `runner.measure(candidate, plan)`.

A runner loads at its first `measure`, so a failed load is the measurement of that candidate.
A runner whose process was lost loads again at the next one.

Each slot holds one runner. Slots share nothing that a probe needs: each may have its own thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from autotune.core.measurement import Measurement, ProbePlan
from autotune.core.space import Candidate


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Room for one runner."""

    number: int  # Index from 0, as `open` takes it
    hosts: frozenset[str]  # Machines of the slot: concurrent probes on one machine slow each other
    words: str  # Display text: `GPUs 0, 1`, `cores 0-3 of node-a`


class ProbeRunner(Protocol):
    """A loaded model and engine, for the candidates with its load_key."""

    load_key: str

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        """Measure one candidate. A failure of the candidate is a measurement too. Raises ProbeError for a fault of the machine,
        SlotLost if the slot is lost with it."""
        ...

    def close(self) -> None:
        """End every process of the runner. Idempotent, also from a signal handler."""
        ...


class Executor(Protocol):
    """Owner of the slots."""

    def prepare(self) -> Mapping[str, str]:
        """Reserve the slots and return the installed versions by package. Idempotent. Raises BadInput or TrainingEnvironmentError
        for slots or an environment that cannot be used."""
        ...

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Slots found by `prepare`, at least one."""
        ...

    def open(self, candidate: Candidate, slot: int = 0) -> ProbeRunner:
        """Return the slot's runner for this candidate's load_key, or replace it by a new one."""
        ...

    @property
    def loads(self) -> int:
        """Number of model loads so far, over all slots."""
        ...

    def interrupt(self) -> None:
        """Make measurements raise ProbeError at once and until `close`. From any thread."""
        ...

    def close(self) -> None:
        """End every runner. Idempotent; `open` works again afterwards."""
        ...

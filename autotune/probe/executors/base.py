"""Interfaces: `executor.open(candidate, slot)` -> runner, `runner.measure(candidate, plan)`; and
several probes at a time.

A runner loads at its first `measure`, so a failed load is the measurement of that candidate. A
runner whose process was lost loads again at the next one. Each slot holds one runner. Slots share
nothing that a probe needs: each may have its own thread.

`ConcurrentProbes` has one thread for each slot. Its caller starts probes and waits for the next one
that ends. A candidate gets a free slot with its model loaded, if there is one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from autotune.core.errors import SlotLost
from autotune.core.measurement import Measurement, Outcome, ProbePlan
from autotune.core.space import Candidate
from autotune.core.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Room for one runner."""

    number: int  # Index from 0, as `open` takes it
    hosts: frozenset[str]  # Machines of the slot: concurrent probes on one machine slow each other
    label: str  # Display text: `GPUs 0, 1`, `cores 0-3 of node-a`


class ProbeRunner(Protocol):
    """A loaded model and engine, for the candidates with its load_key."""

    load_key: str

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        """Measure one candidate. A failure of the candidate is a measurement too. Raises
        ProbeError for a fault of the machine, SlotLost if the slot is lost with it.
        """
        ...

    def close(self) -> None:
        """End every process of the runner. Idempotent, also from a signal handler."""
        ...


class Executor(Protocol):
    def prepare(self) -> Mapping[str, str]:
        """Reserve the slots and return the installed versions by package. Idempotent. Raises
        BadInput or TrainingEnvironmentError for slots or an environment that cannot be used.
        """
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


Ticket = TypeVar("Ticket")

SLOT_CLOSE_SECONDS = 4.0  # Wait for interrupted probes before their executor is closed

# A probe ends at its own deadline; one that runs this much longer has lost its slot.
PROBE_GRACE_SECONDS = 180.0


@dataclass(kw_only=True, eq=False)
class SlotProbe(Generic[Ticket]):
    """A probe in its slot, running or finished."""

    ticket: Ticket
    candidate: Candidate
    plan: ProbePlan
    slot: Slot
    overdue_at: float
    beside: int = 0  # Peak number of other probes on one of its machines

    result: Measurement | BaseException = field(init=False)
    """Set at its end; the exception in the measurement's place."""


class ConcurrentProbes(Generic[Ticket]):
    """Probes of one calling thread. `close` interrupts those that run."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._free: dict[int, Slot] = {slot.number: slot for slot in executor.slots}
        self._loaded: dict[int, str] = {}
        self._running: dict[int, SlotProbe[Ticket]] = {}
        self._inboxes: dict[int, queue.SimpleQueue[SlotProbe[Ticket] | None]] = {}
        self._ended: queue.SimpleQueue[tuple[SlotProbe[Ticket], Measurement | BaseException]] = (
            queue.SimpleQueue()
        )
        self._threads: list[threading.Thread] = []

    @property
    def width(self) -> int:
        """Number of usable slots."""
        return len(self._free) + len(self._running)

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    @property
    def live(self) -> frozenset[str]:
        """Load keys that are loaded in free slots."""
        return frozenset(key for number, key in self._loaded.items() if number in self._free)

    def begin(
        self,
        ticket: Ticket,
        candidate: Candidate,
        plan: ProbePlan,
    ) -> bool:
        """Start a probe in a free slot; return True if it must load first."""

        slot = self._free[min(self._free, key=lambda number: self._cost(number, candidate))]
        loads = self._loaded.get(slot.number) != candidate.load_key
        self._loaded[slot.number] = candidate.load_key
        probe = SlotProbe(
            ticket=ticket,
            candidate=candidate,
            plan=plan,
            slot=slot,
            overdue_at=time.monotonic() + plan.deadline_seconds + PROBE_GRACE_SECONDS,
        )
        del self._free[slot.number]
        self._running[slot.number] = probe
        self._count_neighbours(slot)
        self._inbox_of(slot).put(probe)
        return loads

    def _cost(self, number: int, candidate: Candidate) -> tuple[int, int]:
        """Sort key: a slot with the model loaded, else an empty one, else any."""
        loaded = self._loaded.get(number)
        if loaded == candidate.load_key:
            return 0, number
        return (1 if loaded is None else 2), number

    def _count_neighbours(self, slot: Slot) -> None:
        """Record the number of other probes on each machine of this slot."""
        near = [probe for probe in self._running.values() if probe.slot.hosts & slot.hosts]
        for probe in near:
            on_its_machines = sum(
                bool(neighbour.slot.hosts & probe.slot.hosts) for neighbour in near
            )
            probe.beside = max(probe.beside, on_its_machines - 1)

    def wait(self, seconds: float) -> SlotProbe[Ticket] | None:
        """Return the next probe that ends; None if none does in time."""
        try:
            probe, result = self._ended.get(timeout=seconds)
        except queue.Empty:
            return self._abandon_overdue()
        if self._running.get(probe.slot.number) is not probe:
            return None  # abandoned as overdue before
        return self._finish(probe, result)

    def _abandon_overdue(self) -> SlotProbe[Ticket] | None:
        for probe in self._running.values():
            if time.monotonic() > probe.overdue_at:
                limit = format_seconds(probe.plan.deadline_seconds)
                error = SlotLost(
                    f"A probe on {probe.slot.label} did not end at its deadline of {limit}, nor"
                    " later."
                )
                return self._finish(probe, error)
        return None

    def retire(self, slot: Slot) -> None:
        """Remove the slot from use."""
        self._free.pop(slot.number, None)
        self._loaded.pop(slot.number, None)

    def close(self) -> None:
        """Interrupt running probes and end the threads; `wait(0)` still returns the results."""
        if self._running:
            self._executor.interrupt()
        until = time.monotonic() + (SLOT_CLOSE_SECONDS if self._running else 1.0)
        for inbox in self._inboxes.values():
            inbox.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._inboxes.clear()
        self._threads.clear()

    def _finish(
        self, probe: SlotProbe[Ticket], result: Measurement | BaseException
    ) -> SlotProbe[Ticket]:
        number = probe.slot.number
        del self._running[number]
        self._free[number] = probe.slot
        if isinstance(result, BaseException) or result.outcome is not Outcome.OK:
            self._loaded.pop(number, None)  # the failure may have ended its runner
        probe.result = result
        return probe

    def _inbox_of(self, slot: Slot) -> queue.SimpleQueue[SlotProbe[Ticket] | None]:
        if slot.number not in self._inboxes:
            inbox = self._inboxes[slot.number] = queue.SimpleQueue()
            # A daemon: a thread that hangs in a driver call must not block the exit.
            thread = threading.Thread(
                target=self._serve,
                args=(inbox,),
                name=f"slot-{slot.number}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        return self._inboxes[slot.number]

    def _serve(self, inbox: queue.SimpleQueue[SlotProbe[Ticket] | None]) -> None:
        while (probe := inbox.get()) is not None:
            result: Measurement | BaseException
            try:
                runner = self._executor.open(probe.candidate, probe.slot.number)
                result = runner.measure(probe.candidate, probe.plan)
            except BaseException as error:
                result = error
            self._ended.put((probe, result))

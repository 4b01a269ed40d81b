"""Probes that run beside each other: one thread for each slot of an executor.

The caller begins probes and waits for whichever ends first; it alone speaks to the study. Which slot a candidate gets
is settled here: one that has its model loaded, if there is one that is free.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Generic, TypeVar

from autotune.candidate import Candidate
from autotune.errors import SlotLost
from autotune.executors.base import Executor, Slot
from autotune.measurement import Measurement, Outcome
from autotune.trainers.base import ProbePlan
from autotune.units import format_seconds

Ticket = TypeVar("Ticket")

PATIENCE_SECONDS = 15.0
"""How long interrupted probes are waited for before their executor is closed under them."""

GRACE_SECONDS = 180.0
"""A probe ends at its own deadline; one that did not so much later never will, and its slot is lost."""


@dataclass(kw_only=True, eq=False)
class Begun(Generic[Ticket]):
    """A probe in its slot."""

    ticket: Ticket
    candidate: Candidate
    plan: ProbePlan
    slot: Slot
    overdue_at: float
    beside: int = 0
    """The most probes that ran at the same time on one of its machines, this one not counted."""


@dataclass(frozen=True, kw_only=True)
class Ended(Generic[Ticket]):
    """What became of it: a measurement, or what was raised in its place."""

    ticket: Ticket
    slot: Slot
    plan: ProbePlan
    beside: int
    found: Measurement | BaseException


class Probing(Generic[Ticket]):
    """Used by one thread. `close` interrupts what still runs."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._free: dict[int, Slot] = {slot.number: slot for slot in executor.slots}
        self._loaded: dict[int, str] = {}
        self._running: dict[int, Begun[Ticket]] = {}
        self._waiting: dict[int, queue.SimpleQueue[Begun[Ticket] | None]] = {}
        self._ended: queue.SimpleQueue[tuple[Begun[Ticket], Measurement | BaseException]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def width(self) -> int:
        """How many slots are in use."""
        return len(self._free) + len(self._running)

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    @property
    def live(self) -> frozenset[str]:
        """Load keys that are loaded in slots without a probe."""
        return frozenset(key for number, key in self._loaded.items() if number in self._free)

    def begin(self, ticket: Ticket, candidate: Candidate, plan: ProbePlan) -> bool:
        """Start it in a free slot; whether it has to load first."""
        slot = self._slot_for(candidate)
        loads = self._loaded.get(slot.number) != candidate.load_key
        self._loaded[slot.number] = candidate.load_key
        overdue_at = time.monotonic() + plan.deadline_seconds + GRACE_SECONDS
        begun = Begun(ticket=ticket, candidate=candidate, plan=plan, slot=slot, overdue_at=overdue_at)
        del self._free[slot.number]
        self._running[slot.number] = begun
        self._count_neighbours(begun)
        self._queue_of(slot).put(begun)
        return loads

    def wait(self, seconds: float) -> Ended[Ticket] | None:
        """The next probe that ends, however; None where none does in time."""
        try:
            begun, found = self._ended.get(timeout=seconds)
        except queue.Empty:
            return self._overdue()
        if self._running.get(begun.slot.number) is not begun:
            return None  # it was given up before
        return self._end(begun, found)

    def retire(self, slot: Slot) -> None:
        """Use it no more."""
        self._free.pop(slot.number, None)
        self._loaded.pop(slot.number, None)

    def close(self) -> None:
        """Whatever runs is interrupted, and the threads end; what came of it, `wait(0)` still tells."""
        if self._running:
            self._executor.interrupt()
        until = time.monotonic() + (PATIENCE_SECONDS if self._running else 1.0)
        for inbox in self._waiting.values():
            inbox.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._waiting.clear()
        self._threads.clear()

    def _end(self, begun: Begun[Ticket], found: Measurement | BaseException) -> Ended[Ticket]:
        number = begun.slot.number
        del self._running[number]
        self._free[number] = begun.slot
        if isinstance(found, BaseException) or found.outcome is not Outcome.OK:
            self._loaded.pop(number, None)  # it may have taken its rig along
        return Ended(ticket=begun.ticket, slot=begun.slot, plan=begun.plan, beside=begun.beside, found=found)

    def _overdue(self) -> Ended[Ticket] | None:
        late = next((begun for begun in self._running.values() if time.monotonic() > begun.overdue_at), None)
        if late is None:
            return None
        seconds = format_seconds(late.plan.deadline_seconds)
        return self._end(late, SlotLost(f"A probe on {late.slot.words} did not end at its deadline of {seconds}, nor later."))

    def _slot_for(self, candidate: Candidate) -> Slot:
        """Best one with the model loaded, then one where nothing is: another's load may still be wanted."""
        loaded = self._loaded

        def unfitness(number: int) -> tuple[int, int]:
            return (0 if loaded.get(number) == candidate.load_key else 1 if number not in loaded else 2, number)

        return self._free[min(self._free, key=unfitness)]

    def _count_neighbours(self, begun: Begun[Ticket]) -> None:
        near = [other for other in self._running.values() if other.slot.hosts & begun.slot.hosts]
        for one in near:
            beside = sum(bool(other.slot.hosts & one.slot.hosts) for other in near) - 1
            one.beside = max(one.beside, beside)

    def _queue_of(self, slot: Slot) -> queue.SimpleQueue[Begun[Ticket] | None]:
        if slot.number not in self._waiting:
            inbox = self._waiting[slot.number] = queue.SimpleQueue()
            # A daemon: one that hangs, in a driver's call say, must not keep this process from ending.
            thread = threading.Thread(target=self._serve, args=(inbox,), name=f"slot-{slot.number}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self._waiting[slot.number]

    def _serve(self, inbox: queue.SimpleQueue[Begun[Ticket] | None]) -> None:
        while (begun := inbox.get()) is not None:
            found: Measurement | BaseException
            try:
                rig = self._executor.open(begun.candidate, begun.slot.number)
                found = rig.measure(begun.candidate, begun.plan)
            except BaseException as error:
                found = error
            self._ended.put((begun, found))

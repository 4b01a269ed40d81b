"""Executor on this machine: one worker of the training environment's interpreter per slot.

An interpreter imports its framework once for all runners of its slot. However this process
exits, its workers exit too; `close_all` serves signal handlers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import weakref
from collections.abc import Callable, Mapping, Sequence

from autotune.core.space import Candidate
from autotune.probe.executors.base import ProbeRunner, Slot
from autotune.probe.executors.local_slots import LocalSlot, SlotPlace
from autotune.probe.gpu_set import Gpus
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RunnerSettings

_open_executors: weakref.WeakSet[LocalExecutor] = weakref.WeakSet()


class LocalExecutor:
    """Owner of one local slot per place."""

    def __init__(
        self,
        settings: RunnerSettings,
        requests: RequestBuilders,
        *,
        places: Sequence[SlotPlace] = (SlotPlace(),),
        open_gpus: Callable[[], Gpus] | None = None,
    ) -> None:
        self._slots = [LocalSlot(settings, place, requests, open_gpus) for place in places]
        self.worker = self._slots[0].worker
        self._owner = os.getpid()
        hosts = frozenset({platform.node()})
        self.slots = tuple(Slot(number=number, hosts=hosts, words=place.words) for number, place in enumerate(places))
        _open_executors.add(self)

    def prepare(self) -> Mapping[str, str]:
        return self._slots[0].prepare()

    def open(self, candidate: Candidate, slot: int = 0) -> ProbeRunner:
        return self._slots[slot].open(candidate)

    @property
    def loads(self) -> int:
        return sum(slot.loads for slot in self._slots)

    def interrupt(self) -> None:
        for slot in self._slots:
            slot.interrupt()

    def close(self) -> None:
        if os.getpid() == self._owner:  # a forked child must not end its parent's probes
            self.interrupt()  # all at once, so that they end concurrently
            for slot in self._slots:
                slot.close()


@atexit.register
def close_all() -> None:
    """Close every executor of this process. For signal handlers."""
    for executor in list(_open_executors):
        with contextlib.suppress(Exception):
            executor.close()

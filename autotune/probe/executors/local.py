"""Executor on this machine: one worker of the training environment's interpreter per slot.

Slots are groups of near GPUs, or shares of the CPU cores; disjoint. A request that does not fit
fails before anything starts, with the amounts requested and present. An interpreter imports its
framework once for all runners of its slot. However this process exits, its workers exit too;
`close_all` serves signal handlers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from autotune.core.space import Candidate
from autotune.probe.executors.base import ProbeRunner, Slot
from autotune.probe.executors.local_places import SlotPlace
from autotune.probe.gpu_set import Gpus
from autotune.probe.runner import ProcessRunner, RequestBuilders
from autotune.probe.worker_process import RunnerSettings, WorkerProcess


class LocalSlot:
    """Owner of a worker and its runner. For one thread, except `interrupt` and `close`."""

    def __init__(
        self,
        settings: RunnerSettings,
        place: SlotPlace,
        requests: RequestBuilders,
        open_gpus: Callable[[], Gpus] | None = None,
    ) -> None:
        """`open_gpus` replaces the search by NVML and CUDA_VISIBLE_DEVICES."""
        if open_gpus is None and settings.device_kind == "cuda":
            count = settings.devices or settings.ranks
            open_gpus = partial(
                Gpus, count, settings.limit_bytes, settings.python, variable=place.visible
            )
        self._ranks = settings.ranks
        self._requests = requests
        self.worker = WorkerProcess(settings, open_gpus=open_gpus, cores=place.cores)
        self._runner: ProcessRunner | None = None

    def prepare(self) -> Mapping[str, str]:
        """Start the interpreter and return the installed versions; imports nothing."""
        self.worker.start()
        return dict(self.worker.versions)

    def open(self, candidate: Candidate) -> ProcessRunner:
        if self._runner is None or self._runner.load_key != candidate.load_key:
            self.unload()
            # A load may name fewer ranks than GPUs: a server can have GPUs of its own.
            ranks = candidate.load.get("ranks")
            self._runner = ProcessRunner(
                load_key=candidate.load_key,
                worker=self.worker,
                ranks=ranks if isinstance(ranks, int) else self._ranks,
                requests=self._requests,
            )
        return self._runner

    def unload(self) -> None:
        """Close the runner; the worker keeps its imports."""
        runner = self._runner
        self._runner = None
        if runner is not None:
            runner.close()

    def interrupt(self) -> None:
        self.worker.interrupt()

    def close(self) -> None:
        self._runner = None
        self.worker.close()


_open_executors: weakref.WeakSet[LocalExecutor] = weakref.WeakSet()


class LocalExecutor:
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
        slots = []
        for number, place in enumerate(places):
            slots.append(
                Slot(
                    number=number,
                    hosts=hosts,
                    label=place.label,
                )
            )
        self.slots = tuple(slots)
        _open_executors.add(self)

    def prepare(self) -> Mapping[str, str]:
        return self._slots[0].prepare()

    def open(self, candidate: Candidate, slot: int = 0) -> ProbeRunner:
        return self._slots[slot].open(candidate)

    @property
    def loads(self) -> int:
        return sum(slot.worker.loads for slot in self._slots)

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

"""Probes on this machine, in the training environment's own interpreter: in each slot one keeper and one live rig.

An interpreter imports its framework once, for all rigs of its slot. Whatever way this process ends, nothing
that it started stays: its keepers end with it, and `close_all` is there for signal handlers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autotune.candidate import Candidate
from autotune.executors.base import Slot
from autotune.executors.seat import Place, Seat, Setting
from autotune.hardware import DeviceKind
from autotune.rig.gpus import Gpus
from autotune.rig.keeper import Keeper, Supported
from autotune.rig.process_rig import LoadRequest, ProbeRequest, ProcessRig, Requests

_live: weakref.WeakSet[LocalExecutor] = weakref.WeakSet()


class LocalExecutor:
    """Owner of the seats."""

    def __init__(
        self,
        *,
        python: Path,
        adapter: str,
        ranks: int,
        load_request: LoadRequest,
        probe_request: ProbeRequest,
        limit_bytes: int,
        device_kind: DeviceKind = "cpu",
        supported_versions: Supported | None = None,
        scratch_root: Path | None = None,
        devices: int | None = None,
        open_gpus: Callable[[], Gpus] | None = None,
        places: Sequence[Place] = (Place(),),
    ) -> None:
        """`devices` is how many GPUs the probes use, as many as ranks unless told; `open_gpus` finds them another way.
        Every place is a slot."""
        setting = Setting(
            python=python, adapter=adapter, ranks=ranks, limit_bytes=limit_bytes, device_kind=device_kind,
            supported=dict(supported_versions or {}), scratch_root=scratch_root, devices=devices, open_gpus=open_gpus,
        )  # fmt: skip
        requests = Requests(load=load_request, probe=probe_request)
        self._seats = [Seat(setting, place, requests, self._count) for place in places]
        self._loads, self._counting = 0, threading.Lock()
        self._owner = os.getpid()
        here = frozenset({platform.node()})
        self.slots = tuple(Slot(number=number, hosts=here, words=place.words) for number, place in enumerate(places))
        _live.add(self)

    def prepare(self) -> Mapping[str, str]:
        return self._seats[0].prepare()

    def open(self, candidate: Candidate, slot: int = 0) -> ProcessRig:
        return self._seats[slot].open(candidate)

    @property
    def loads(self) -> int:
        return self._loads

    @property
    def keeper_pid(self) -> int | None:
        """The first slot's; None before its first start."""
        return self._keeper.pid

    @property
    def bound_by(self) -> str | None:
        """What enforces the limit; None before the first start."""
        return self._keeper.bound_by if self._keeper.alive else None

    @property
    def _keeper(self) -> Keeper:
        return self._seats[0].keeper

    def interrupt(self) -> None:
        for seat in self._seats:
            seat.interrupt()

    def close(self) -> None:
        if os.getpid() == self._owner:  # a forked child of ours has no say in this
            self.interrupt()  # all at once, so that they end beside each other
            for seat in self._seats:
                seat.close()

    def _count(self) -> None:
        with self._counting:
            self._loads += 1


@atexit.register
def close_all() -> None:
    """End everything that any executor of this process has started. For signal handlers."""
    for executor in list(_live):
        with contextlib.suppress(Exception):
            executor.close()

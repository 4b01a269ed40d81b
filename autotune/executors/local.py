"""Probes on this machine, in the training environment's own interpreter: one slot, one live rig.

The interpreter imports its framework once, for all rigs. Whatever way this process ends, nothing
that it started stays: its keeper ends with it, and `close_all` is there for signal handlers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from autotune.candidate import Candidate
from autotune.hardware import DeviceKind
from autotune.rig.gpus import Gpus
from autotune.rig.keeper import Keeper, Supported
from autotune.rig.process_rig import LoadRequest, ProbeRequest, ProcessRig, Requests

_live: weakref.WeakSet[LocalExecutor] = weakref.WeakSet()


class LocalExecutor:
    """Owner of one keeper and of the rig that lives under it."""

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
    ) -> None:
        """`devices` is how many GPUs the probes use, as many as ranks unless told; `open_gpus` finds them another way."""
        if device_kind == "cuda" and open_gpus is None:
            open_gpus = partial(Gpus, devices or ranks, limit_bytes, python)
        self._keeper = Keeper(
            python=python, adapter=adapter, supported=dict(supported_versions or {}), limit_bytes=limit_bytes,
            device_kind=device_kind, scratch_root=scratch_root, open_gpus=open_gpus,
        )  # fmt: skip
        self._ranks = ranks
        self._requests = Requests(load=load_request, probe=probe_request)
        self._rig: ProcessRig | None = None
        self._loads = 0
        self._owner = os.getpid()
        _live.add(self)

    def prepare(self) -> Mapping[str, str]:
        """Start the interpreter and see what is installed, importing nothing: TrainingEnvironmentError where it will not do."""
        self._keeper.start()
        return dict(self._keeper.versions)

    def open(self, candidate: Candidate) -> ProcessRig:
        if self._rig is None or self._rig.load_key != candidate.load_key:
            if self._rig is not None:
                self._rig.close()
            self._rig = ProcessRig(
                load_key=candidate.load_key, keeper=self._keeper, ranks=self._ranks_of(candidate), requests=self._requests,
                on_load=self._count,
            )  # fmt: skip
        return self._rig

    def _ranks_of(self, candidate: Candidate) -> int:
        """As many as the candidate's load says: where a server has GPUs of its own, fewer processes train."""
        named = candidate.load.get("ranks")
        return named if isinstance(named, int) else self._ranks

    @property
    def loads(self) -> int:
        return self._loads

    @property
    def keeper_pid(self) -> int | None:
        """The process below which everything of this executor runs; None before the first start."""
        return self._keeper.pid

    @property
    def bound_by(self) -> str | None:
        """What enforces the limit; None before the first start."""
        return self._keeper.bound_by if self._keeper.alive else None

    def close(self) -> None:
        if os.getpid() == self._owner:  # a forked child of ours has no say in this
            self._rig = None
            self._keeper.close()

    def _count(self) -> None:
        self._loads += 1


@atexit.register
def close_all() -> None:
    """End everything that any executor of this process has started. For signal handlers."""
    for executor in list(_live):
        with contextlib.suppress(Exception):
            executor.close()

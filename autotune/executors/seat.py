"""One slot on the machine where this runs: a keeper of its own, and the rig that lives under it.

The same in the local executor and in an actor on a cluster's node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from autotune.candidate import Candidate
from autotune.hardware import DeviceKind
from autotune.rig.gpus import Gpus
from autotune.rig.keeper import Keeper, Span, Supported
from autotune.rig.process_rig import ProcessRig, Requests


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a slot has of its machine."""

    words: str = "this machine"
    visible: str | None = None
    """What CUDA_VISIBLE_DEVICES says there; None leaves it as it is."""

    cores: frozenset[int] | None = None
    """Where its processes may run; None leaves that as it is."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How rigs are started: the same in every slot of an executor."""

    python: Path
    adapter: str
    ranks: int
    limit_bytes: int
    device_kind: DeviceKind = "cpu"
    supported: Supported = field(default_factory=dict)
    scratch_root: Path | None = None
    devices: int | None = None
    """How many GPUs the probes use; None for as many as ranks."""

    open_gpus: Callable[[], Gpus] | None = None
    """Finds the GPUs in another way than by NVML and CUDA_VISIBLE_DEVICES."""

    def at(self, place: Place) -> Setting:
        """With the way to this place's GPUs."""
        if self.device_kind != "cuda" or self.open_gpus is not None:
            return self
        found = partial(Gpus, self.devices or self.ranks, self.limit_bytes, self.python, variable=place.visible)
        return replace(self, open_gpus=found)


class Seat:
    """Owner of one keeper and of the rig that lives under it. Used by one thread at a time, `interrupt` and `close` apart."""

    def __init__(self, setting: Setting, place: Place, requests: Requests, on_load: Callable[[], None]) -> None:
        setting = setting.at(place)
        self._ranks, self._requests, self._on_load = setting.ranks, requests, on_load
        self.place = place
        self.keeper = Keeper(
            python=setting.python, adapter=setting.adapter, supported=dict(setting.supported), limit_bytes=setting.limit_bytes,
            device_kind=setting.device_kind, scratch_root=setting.scratch_root, open_gpus=setting.open_gpus, cores=place.cores,
        )  # fmt: skip
        self._rig: ProcessRig | None = None

    def prepare(self) -> Mapping[str, str]:
        """Start the interpreter and see what is installed, importing nothing: TrainingEnvironmentError where it will not do."""
        self.keeper.start()
        return dict(self.keeper.versions)

    def open(self, candidate: Candidate) -> ProcessRig:
        if self._rig is None or self._rig.load_key != candidate.load_key:
            self.unload()
            self._rig = ProcessRig(
                load_key=candidate.load_key, keeper=self.keeper, ranks=self._ranks_of(candidate), requests=self._requests,
                on_load=self._on_load,
            )  # fmt: skip
        return self._rig

    def span(self, span: Span | None) -> None:
        """Where the next load's ranks stand among those of other machines."""
        self.keeper.span = span

    def unload(self) -> None:
        """End the rig, and keep what was imported."""
        rig, self._rig = self._rig, None
        if rig is not None:
            rig.close()

    def interrupt(self) -> None:
        self.keeper.interrupt()

    def close(self) -> None:
        self._rig = None
        self.keeper.close()

    def _ranks_of(self, candidate: Candidate) -> int:
        """As many as the candidate's load says: where a server has GPUs of its own, fewer processes train."""
        named = candidate.load.get("ranks")
        return named if isinstance(named, int) else self._ranks

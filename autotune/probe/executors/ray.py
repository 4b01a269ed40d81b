"""Executor on a Ray cluster, by Ray Core alone: a placement group per slot, an actor per node.

An actor contains the same slot as the local executor. However it exits, its worker exits too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from autotune.core.errors import BadInput
from autotune.core.job import Hardware
from autotune.core.space import Candidate
from autotune.probe.executors.base import Slot
from autotune.probe.executors.ray_cluster import (
    CLUSTER_CLOSE_SECONDS,
    HURRIED_CLOSE_SECONDS,
    ClusterRunner,
    ClusterSlot,
    RayCluster,
    inspect_nodes,
)
from autotune.probe.executors.ray_plan import in_words, plan
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RunnerSettings

RESERVE_SECONDS = 60.0  # Wait for resources that other jobs of the cluster hold


class RayExecutor:
    """Owner of the cluster slots, which are independent once `prepare` has reserved them."""

    def __init__(
        self,
        settings: RunnerSettings,
        requests: RequestBuilders,
        *,
        hardware: Hardware,
        address: str | None = None,
        slots: int | None = None,
    ) -> None:
        self._settings = settings
        self._requests = requests
        self._hardware = hardware
        self._requested = slots
        self._cluster = RayCluster(address)
        self._slots: list[ClusterSlot] = []
        self._versions: Mapping[str, str] = {}
        self._loads_of_closed_slots = 0

    def prepare(self) -> Mapping[str, str]:
        if not self._slots:
            self._cluster.connect()
            try:
                self._versions = self._open_slots()
            except BaseException:
                self.close()
                raise
        return self._versions

    @property
    def slots(self) -> tuple[Slot, ...]:
        self.prepare()
        slots = []
        for number, slot in enumerate(self._slots):
            label = f"slot {number} on {' and '.join(sorted(slot.hosts))}"
            slots.append(
                Slot(
                    number=number,
                    hosts=slot.hosts,
                    label=label,
                )
            )
        return tuple(slots)

    def open(self, candidate: Candidate, slot: int = 0) -> ClusterRunner:
        self.prepare()
        return self._slots[slot].open(candidate)

    @property
    def loads(self) -> int:
        return self._loads_of_closed_slots + sum(slot.loads for slot in self._slots)

    def interrupt(self) -> None:
        self._cluster.interrupted = True

    def close(self) -> None:
        is_hurried = self._cluster.interrupted
        until = time.monotonic() + (HURRIED_CLOSE_SECONDS if is_hurried else CLUSTER_CLOSE_SECONDS)
        self._cluster.interrupted = True
        for slot in self._slots:
            slot.begin_close()
        for slot in self._slots:
            slot.close(until - time.monotonic())
        self._loads_of_closed_slots = self.loads
        self._slots.clear()
        self._cluster.disconnect()
        self._cluster.interrupted = False

    def _open_slots(self) -> Mapping[str, str]:
        # 1. Divide the nodes, reserve every slot's resources at once, then wait.
        cut = plan(inspect_nodes(), self._hardware, self._settings.limit_bytes, self._requested)
        for number in range(cut.slots):
            slot = ClusterSlot(self._cluster, cut, number, self._settings, self._requests)
            self._slots.append(slot)
        for slot in self._slots:
            slot.reserve()
        # 2. Keep those with resources in time; an explicitly requested number must be complete.
        until = time.monotonic() + RESERVE_SECONDS
        ready = []
        for slot in self._slots:
            if slot.wait_for_room(max(1.0, until - time.monotonic())):
                ready.append(slot)
        for slot in self._slots:
            if slot not in ready:
                slot.close()
        if not ready or (self._requested is not None and len(ready) < self._requested):
            raise BadInput(
                f"{self._requested or 1} slots of {self._hardware} need {dict(cut.bundle)} each on"
                f" {len(cut.ranks)} nodes; the cluster has {in_words(cut.nodes)}, and after"
                f" {RESERVE_SECONDS:.0f} s only {len(ready)} were free.",
                way_out="Wait until other jobs end (see `ray status`), or use fewer --slots.",
            )
        self._slots = ready
        # 3. Start the actors; their versions must agree.
        versions = [slot.start() for slot in ready]
        differing = _differing_packages(versions)
        if differing:
            raise BadInput(
                "The nodes have different versions installed: their measurements are not"
                f" comparable ({', '.join(differing)}).",
                way_out="Install the same on every node.",
            )
        return {**versions[0], "nodes": " ".join(cut.nodes[0].kind)}


def _differing_packages(versions_of_nodes: Sequence[Mapping[str, str]]) -> list[str]:
    names: set[str] = set()
    for versions in versions_of_nodes:
        names |= set(versions)
    differing = []
    for name in sorted(names):
        if len({versions.get(name) for versions in versions_of_nodes}) > 1:
            differing.append(name)
    return differing

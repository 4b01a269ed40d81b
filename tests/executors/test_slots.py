"""Division into slots: of GPUs by NVML's topology, of cores, of clusters."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import BadInput, HardwareNotHere
from autotune.core.job import Hardware
from autotune.probe.executors.local_places import (
    available_cores,
    groups_of,
    listed,
    local_places,
    shares_of,
)
from autotune.probe.executors.ray_plan import Node, Plan, in_words, plan
from tests.probe.nvml_playback import Playback

GIB = 2**30


def gpus(count: int) -> Hardware:
    return Hardware(
        kind="cuda",
        name="A100-40G",
        count=count,
        memory_bytes=40 * GIB,
        here=True,
    )


def cpus(count: int = 1, memory: int = 16 * GIB) -> Hardware:
    return Hardware(
        kind="cpu",
        name="cpu",
        count=count,
        memory_bytes=memory,
        here=True,
    )


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_eight_gpus_in_bridged_pairs_make_four_slots_of_two() -> None:
    """Topology of a PCIe machine with NVLink bridges between 0 and 4, 1 and 5, 2 and 6, 3 and 7."""

    def distance(gpu: int, peer: int) -> int:
        if abs(gpu - peer) == 4:
            return 0
        return 20 if gpu // 4 == peer // 4 else 50

    assert groups_of(range(8), 2, distance) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_four_of_eight_share_a_socket_and_a_rest_is_unused() -> None:
    sockets = [0, 1, 0, 1, 0, 1, 0, 1, 1]

    def distance(gpu: int, peer: int) -> int:
        return 10 if sockets[gpu] == sockets[peer] else 50

    assert groups_of(range(9), 4, distance) == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_unknown_distances_keep_the_order() -> None:
    assert groups_of(range(5), 2, lambda gpu, peer: None) == [(0, 1), (2, 3)]


def test_a_very_large_machine_is_grouped_in_time() -> None:
    assert groups_of(range(64), 32, lambda gpu, peer: abs(gpu - peer))[0] == tuple(range(32))


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
def test_shares_cover_all_cores(slots: int) -> None:
    shares = shares_of(list(range(7)), slots)
    assert sorted(core for share in shares for core in share) == list(range(7))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_cores_in_words() -> None:
    assert listed({0, 1, 2, 3, 8}) == "0-3, 8"


def test_cores_of_one_node_are_adjacent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cores in {"node0": "0,2,4-5", "node1": "1,3,6-7"}.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr("autotune.probe.executors.local_places._physical", lambda core: core)
    assert available_cores(tmp_path) == [0, 2, 4, 5, 1, 3, 6, 7]


class Linked(Playback):
    """Eight GPUs of the recorded kind, in two sockets, bridged in pairs across; some are in use."""

    def __init__(self, busy: tuple[int, ...] = (), reported: bool = True) -> None:
        super().__init__("two_a100")
        device = self._recording["devices"][0]
        devices, self._moment = [], []
        for number in range(8):
            used_mib = 20000 if number in busy else 4
            devices.append({**device, "uuid": f"GPU-{number:08d}"})
            self._moment.append({"used_mib": used_mib, "compute": []})
        self._recording = {**self._recording, "devices": devices}
        self._reported = reported

    def nvmlDeviceGetP2PStatus(
        self,
        handle: Any,
        peer: Any,
        index: int,
    ) -> int:
        return 0 if self._reported and abs(handle[0] - peer[0]) == 4 else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, handle: Any, peer: Any) -> int:
        if not self._reported:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return 20 if handle[0] // 4 == peer[0] // 4 else 50

    def nvmlDeviceGetCpuAffinity(self, handle: Any, word_count: int) -> list[int]:
        return [0b01 if handle[0] < 4 else 0b10] + [0] * (word_count - 1)


def visible(places: Any) -> list[str]:
    """Return the numbers of the GPUs of each slot."""
    return [re.sub("GPU-0*(?=[0-9])", "", place.visible) for place in places]


def visible_here(
    count: int,
    slots: int | None = None,
    library: Linked | None = None,
) -> list[str]:
    """Return the GPUs of each slot for jobs of so many GPUs."""
    return visible(local_places(gpus(count), 40 * GIB, slots, library or Linked()))


def test_slots_are_derived_from_the_job_and_the_machine() -> None:
    places = local_places(gpus(2), 40 * GIB, None, Linked())
    assert visible(places) == ["0,4", "1,5", "2,6", "3,7"]
    assert places[0].label == "GPUs 0, 4"
    available = frozenset(available_cores())
    for place in places:
        assert place.cores is None or place.cores <= available
    assert visible_here(4) == ["0,1,2,3", "4,5,6,7"]
    assert visible_here(2, slots=3) == ["0,4", "1,5", "2,6"]


def test_single_slot_keeps_the_affinity() -> None:
    (place,) = local_places(gpus(8), 40 * GIB, None, Linked())
    assert place.cores is None


def test_busy_gpus_serve_only_a_single_slot() -> None:
    assert visible_here(2, library=Linked(busy=(1, 5, 7))) == ["0,4", "2,6"]
    assert visible_here(8, library=Linked(busy=(1,))) == ["0,1,2,3,4,5,6,7"]
    with pytest.raises(
        BadInput,
        match=(
            r"4 slots of 2xA100-40G need 8 GPUs, and 8 such are here, 3 of them in use.*--slots 2"
        ),
    ):
        local_places(gpus(2), 40 * GIB, 4, Linked(busy=(1, 5, 7)))


def test_without_topology_gpus_are_taken_in_order() -> None:
    library = Linked(reported=False)
    assert visible_here(2, library=library) == ["0,1", "2,3", "4,5", "6,7"]


def test_cpu_slots_have_their_own_cores_and_memory_or_are_refused() -> None:
    count = len(available_cores())
    (only,) = local_places(cpus(), 8 * GIB, None)
    assert only.cores is None
    with pytest.raises(
        BadInput, match=rf"{count + 1} slots do not fit on {count} cores.*--slots {count}"
    ):
        local_places(cpus(), 1 * GIB, count + 1)
    if count > 1:
        first, second = local_places(cpus(), 8 * GIB, 2)
        assert first.cores and second.cores and not first.cores & second.cores
        with pytest.raises(
            BadInput,
            match=r"2 slots of 9 GiB each need more than this machine's 16 GiB.*at most 8 GiB",
        ):
            local_places(cpus(), 9 * GIB, 2)


def node(
    name: str,
    *,
    gpus: int = 0,
    kind: str = "A100-40G",
    cpus: int = 8,
    memory: int = 64 * GIB,
    model: str = "EPYC",
) -> Node:
    return Node(
        id=name,
        host=name,
        cpus=cpus,
        gpus=gpus,
        cores=tuple(range(cpus)),
        memory_bytes=memory,
        processor=model,
        devices=(kind,) * gpus,
        version="0",
    )


def test_a_clusters_gpus_are_packed_node_by_node() -> None:
    slot_plan = plan([node("a", gpus=8), node("b", gpus=3), node("c")], gpus(2), 40 * GIB, None)
    assert (slot_plan.slots, slot_plan.ranks, slot_plan.bundle["GPU"]) == (5, (2,), 2)
    assert not slot_plan.spans


def test_a_job_larger_than_a_node_spans_equal_parts_of_several() -> None:
    slot_plan = plan([node(name, gpus=8) for name in "abcd"], gpus(16), 40 * GIB, None)
    assert (slot_plan.slots, slot_plan.ranks, slot_plan.spans) == (2, (8, 8), True)


def test_unlike_gpus_are_left_out_and_named() -> None:
    slot_plan = plan(
        [node("a", gpus=4), node("b", gpus=8, kind="H100-80G")], gpus(2), 40 * GIB, None
    )
    assert ids_of(slot_plan) == ["a"] and slot_plan.slots == 2
    assert "1 node of 8 H100-80G is left out" in slot_plan.notes[0]


def test_unlike_processors_are_left_out_too() -> None:
    nodes = [node("a"), node("b"), node("c", model="Xeon")]
    slot_plan = plan(nodes, cpus(), 16 * GIB, None)
    assert ids_of(slot_plan) == ["a", "b"] and slot_plan.slots == 2
    assert slot_plan.notes and "left out" in slot_plan.notes[0]


def ids_of(slot_plan: Plan) -> list[str]:
    return [cluster_node.id for cluster_node in slot_plan.nodes]


def test_cpu_slots_per_node_are_limited_by_memory() -> None:
    slot_plan = plan([node("a"), node("b")], cpus(), 16 * GIB, 4)
    assert (slot_plan.per_node, slot_plan.bundle["CPU"]) == (2, 4)
    with pytest.raises(
        BadInput, match=r"9 slots of cpu were requested, and the cluster has room for 8"
    ):
        plan([node("a"), node("b")], cpus(), 16 * GIB, 9)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([], "no node that is alive"),
        (
            [node("a", gpus=8, kind="H100-80G")],
            r"2xA100-40G was requested, and the cluster has 1 node of 8 H100-80G.*--gpus",
        ),
        ([node("a")], r"the cluster has 1 node of 8 CPUs and 64 GiB"),
    ],
)
def test_missing_resources_are_reported_with_those_present(
    nodes: list[Node], expected: str
) -> None:
    with pytest.raises((BadInput, HardwareNotHere), match=expected):
        plan(nodes, gpus(2), 40 * GIB, None)


def test_a_limit_beyond_every_node_is_refused() -> None:
    with pytest.raises(
        HardwareNotHere, match=r"may use 128 GiB, and no node has as much.*--memory-limit"
    ):
        plan([node("a")], cpus(), 128 * GIB, None)


def test_nodes_in_words() -> None:
    assert in_words([node("a", gpus=8), node("b", gpus=8)]) == "2 nodes of 8 A100-40G"

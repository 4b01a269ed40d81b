"""Places of slots on this machine: their GPUs and cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, permutations
from pathlib import Path
from typing import TypeVar

from autotune.core.errors import BadInput, HardwareNotHere
from autotune.core.job import Hardware
from autotune.core.units import format_bytes
from autotune.machine import hardware_detection
from autotune.machine.nvml import (
    VISIBLE,
    Device,
    GpuLost,
    Nvml,
    NvmlNotSupported,
    NvmlUnavailable,
    devices_of,
)

IDLE_SHARE = 0.05  # Further slots use only GPUs of which others hold at most this share

UNKNOWN_DISTANCE = 100  # Beyond every distance that NVML reports

# Combinations that are compared for one group; beyond, the nearest GPUs are taken one by one.
MAX_GROUPS = 5000

_NODES = Path("/sys/devices/system/node")

_T = TypeVar("_T")
Distance = Callable[[_T, _T], int | None]


@dataclass(frozen=True, kw_only=True)
class SlotPlace:
    """Share of the machine that a slot uses."""

    label: str = "this machine"
    visible: str | None = None  # CUDA_VISIBLE_DEVICES of the slot; None leaves it
    cores: frozenset[int] | None = None  # CPU affinity of its processes; None leaves it


def local_places(
    hardware: Hardware,
    limit_bytes: int,
    slots: int | None,
    library: object = None,
) -> tuple[SlotPlace, ...]:
    """Return one place per slot: as many as requested, or as many as the idle GPUs allow."""
    if hardware.kind == "cpu":
        return cpu_places(slots or 1, limit_bytes, hardware.memory_bytes, available_cores())
    try:
        nvml = Nvml.open(library)
    except NvmlUnavailable:
        if slots is not None and slots > 1:
            raise BadInput(
                f"{slots} slots need NVML to distinguish this machine's GPUs, and it does not"
                " answer.",
                way_out="Install nvidia-ml-py, see that `nvidia-smi` works, or leave --slots out.",
            ) from None
        return (SlotPlace(label=f"this machine's {hardware}"),)
    with contextlib.closing(nvml):
        return _gpu_places(nvml, hardware, slots)


def cpu_places(
    slots: int,
    limit_bytes: int,
    memory_bytes: int,
    cores: Sequence[int],
) -> tuple[SlotPlace, ...]:
    if slots == 1:
        return (SlotPlace(),)
    if slots > len(cores):
        raise BadInput(
            f"{slots} slots do not fit on {len(cores)} cores.",
            way_out=f"Use at most --slots {len(cores)}.",
        )
    if slots * limit_bytes > memory_bytes:
        largest = format_bytes(memory_bytes // slots)
        raise BadInput(
            f"{slots} slots of {format_bytes(limit_bytes)} each need more than this machine's"
            f" {format_bytes(memory_bytes)}.",
            way_out=f"Give --memory-limit at most {largest}, or use fewer --slots.",
        )
    shares = shares_of(cores, slots)
    return tuple(SlotPlace(label=f"cores {listed(share)}", cores=share) for share in shares)


def _gpu_places(
    nvml: Nvml,
    hardware: Hardware,
    slots: int | None,
) -> tuple[SlotPlace, ...]:
    try:
        # 1. GPUs of the requested kind: probes of one study must run on equal GPUs.
        devices = devices_of(nvml, os.environ.get(VISIBLE))
        alike = [device for device in devices if device.uuid and _is_named(device, hardware.name)]
        idle = [device for device in alike if _is_idle(nvml, device)]

        # 2. Near groups of idle ones. A single slot may share GPUs: the others' part is metered.
        distances = _distances(nvml, idle)
        groups = groups_of(idle, hardware.count, lambda a, b: distances.get((a.uuid, b.uuid)))
        if not groups:
            groups = groups_of(alike, hardware.count, lambda *_: None)[:1]
        if slots is not None and slots > len(groups):
            busy = len(alike) - len(idle)
            raise _too_many_slots(slots, hardware, len(alike), busy, len(groups))
        if not groups:
            raise HardwareNotHere(
                f"{hardware} is not on this machine.",
                way_out=f"Type --gpus {'local' if devices else 'cpu'}, or --mode predict.",
            )

        # 3. Several slots use the cores near their GPUs; a single one keeps the affinity.
        chosen = groups[: slots or len(groups)]
        is_single = len(chosen) == 1
        return tuple(_place(nvml, group, is_single=is_single) for group in chosen)
    except (NvmlNotSupported, GpuLost) as error:
        raise HardwareNotHere(
            f"This machine's GPUs can't be read: {error}.", way_out="See that `nvidia-smi` works."
        ) from error


def _is_named(device: Device, name: str) -> bool:
    gpu = hardware_detection.recognise(device)
    return name == device.name or (gpu is not None and name == gpu.name)


def _is_idle(nvml: Nvml, device: Device) -> bool:
    return nvml.used_bytes(str(device.uuid)) <= IDLE_SHARE * device.memory_bytes


def _distances(
    nvml: Nvml, devices: Sequence[Device]
) -> dict[tuple[str | None, str | None], int | None]:
    distances = {}
    for device, peer in permutations(devices, 2):
        distance = nvml.distance(str(device.uuid), str(peer.uuid))
        distances[(device.uuid, peer.uuid)] = distance
    return distances


def _too_many_slots(
    slots: int,
    hardware: Hardware,
    present: int,
    busy: int,
    possible_slots: int,
) -> BadInput:
    in_use = f", {busy} of them in use by others" if busy else ""
    way_out = "Wait until they are free."
    if possible_slots:
        way_out = f"Use at most --slots {possible_slots}, or leave --slots out."
    return BadInput(
        f"{slots} slots of {hardware} need {slots * hardware.count} GPUs, and {present}"
        f" such are here{in_use}.",
        way_out=way_out,
    )


def _place(
    nvml: Nvml,
    group: Sequence[Device],
    *,
    is_single: bool,
) -> SlotPlace:
    cores = None
    if not is_single:
        cores = _cores_near(nvml, group)
    numbers = ", ".join(str(device.index) for device in group)
    return SlotPlace(
        label=f"GPU {numbers}" if len(group) == 1 else f"GPUs {numbers}",
        visible=",".join(str(device.uuid) for device in group),
        cores=cores,
    )


def _cores_near(nvml: Nvml, group: Sequence[Device]) -> frozenset[int] | None:
    """Return our cores near these GPUs; None where those of one are unknown, or none is ours."""
    near: set[int] = set()
    for device in group:
        cores = nvml.cores_near(str(device.uuid))
        if cores is None:
            return None
        near |= cores
    return frozenset(near & set(available_cores())) or None


def groups_of(
    things: Sequence[_T],
    size: int,
    distance: Distance[_T],
) -> list[tuple[_T, ...]]:
    """Return as many groups of this size as possible, of near members. Greedy: the first
    remaining member takes the nearest others. Optimal for NVLink pairs or sockets.
    """
    groups: list[tuple[_T, ...]] = []
    ungrouped = list(things)
    while len(ungrouped) >= size:
        first, *candidates = ungrouped
        group = (first, *_nearest(first, candidates, size - 1, distance))
        groups.append(group)
        ungrouped = [thing for thing in ungrouped if thing not in group]
    return groups


def _nearest(
    first: _T,
    candidates: Sequence[_T],
    count: int,
    distance: Distance[_T],
) -> tuple[_T, ...]:
    def apart(pair: tuple[_T, _T]) -> int:
        reported = distance(*pair)
        return UNKNOWN_DISTANCE if reported is None else reported

    companies = list(islice(combinations(candidates, count), MAX_GROUPS + 1))
    if len(companies) > MAX_GROUPS:
        by_distance = sorted(candidates, key=lambda candidate: apart((first, candidate)))
        return tuple(by_distance[:count])
    return min(companies, key=lambda company: sum(map(apart, combinations((first, *company), 2))))


def shares_of(cores: Sequence[int], slots: int) -> list[frozenset[int]]:
    """Divide the cores, in this order, into shares whose sizes differ by at most one."""
    size, larger = divmod(len(cores), slots)
    shares = []
    start = 0
    for number in range(slots):
        end = start + size + (number < larger)
        shares.append(frozenset(cores[start:end]))
        start = end
    return shares


def listed(cores: Collection[int]) -> str:
    """Return the cores as display text: `0-3, 8`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    texts = []
    for first, last in runs:
        texts.append(f"{first}-{last}" if last > first else str(first))
    return ", ".join(texts)


def available_cores(nodes: Path = _NODES) -> list[int]:
    """Return the cores of our affinity, ordered by memory node and physical core."""
    node_of: dict[int, int] = {}
    for folder in nodes.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            for part in (folder / "cpulist").read_text().strip().split(","):
                first, _, last = part.partition("-")
                for core in range(int(first), int(last or first) + 1):
                    node_of[core] = int(folder.name[4:])

    def position(core: int) -> tuple[int, int, int]:
        return node_of.get(core, 0), _physical(core), core

    return sorted(os.sched_getaffinity(0), key=position)


def _physical(core: int) -> int:
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{core}/topology/core_id").read_text())
    except (OSError, ValueError):
        return core

"""The slots that this machine has for a job: so many GPUs each, near to each other; on a CPU so many cores.

What there is not enough of is said before anything is started: what was asked for, what there is, and the way out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune import detect
from autotune.devices import VISIBLE, Device, devices_of
from autotune.errors import BadInput, HardwareNotHere
from autotune.executors.grouping import groups_of, listed, shares_of
from autotune.executors.seat import Place
from autotune.hardware import Hardware
from autotune.nvml import CardLost, NotTold, Nvml, NvmlUnavailable
from autotune.units import format_bytes

IDLE_SHARE = 0.05
"""A GPU of which others hold more than this is not taken for a further slot."""

_NODES = Path("/sys/devices/system/node")


def places_here(hardware: Hardware, limit_bytes: int, slots: int | None, library: object = None) -> tuple[Place, ...]:
    """One for each slot: as many as were asked for, or as many as the job's GPUs fit into this machine's idle ones."""
    if hardware.kind == "cpu":
        return _cpu_places(slots or 1, limit_bytes, hardware.memory_bytes, cores_here())
    try:
        nvml = Nvml.open(library)
    except NvmlUnavailable:
        return _untold(hardware, slots)
    with contextlib.closing(nvml):
        return _gpu_places(nvml, hardware, slots)


def _cpu_places(slots: int, limit_bytes: int, memory_bytes: int, cores: Sequence[int]) -> tuple[Place, ...]:
    if slots == 1:
        return (Place(),)
    if slots > len(cores):
        raise BadInput(f"{slots} slots were asked for on {len(cores)} cores.", way_out=f"Ask for at most --slots {len(cores)}.")
    if slots * limit_bytes > memory_bytes:
        each = format_bytes(memory_bytes // slots)
        raise BadInput(
            f"{slots} slots of {format_bytes(limit_bytes)} each need more than this machine's {format_bytes(memory_bytes)}.",
            way_out=f"Give --memory-limit at most {each}, or ask for fewer --slots.",
        )
    return tuple(Place(words=f"cores {listed(share)}", cores=share) for share in shares_of(cores, slots))


def _gpu_places(nvml: Nvml, hardware: Hardware, slots: int | None) -> tuple[Place, ...]:
    try:
        devices = [device for device in devices_of(nvml, os.environ.get(VISIBLE)) if device.uuid is not None]
        alike = [device for device in devices if _is_asked_for(device, hardware)]
        idle = [device for device in alike if _is_idle(nvml, device)]
        # The only slot may be on GPUs that others use too: their share is measured, and said.
        groups = groups_of(idle, hardware.count, _distances(nvml, idle)) or groups_of(alike, hardware.count, lambda *_: None)[:1]
        if slots is not None and slots > len(groups):
            raise _too_few(slots, hardware, alike, idle, len(groups))
        if not groups:
            raise HardwareNotHere(f"{hardware} is not on this machine.", way_out="Type --gpus local, or --mode predict.")
        chosen = groups[: slots or len(groups)]
        return tuple(_place(nvml, group, alone=len(chosen) == 1) for group in chosen)
    except (NotTold, CardLost) as error:
        raise HardwareNotHere(f"This machine's GPUs can't be read: {error}.", way_out="See that `nvidia-smi` works.") from error


def _is_asked_for(device: Device, hardware: Hardware) -> bool:
    """Probes of one study run on GPUs that are alike, wherever there are others beside them."""
    known = detect.recognise(device)
    return hardware.name in (device.name, None if known is None else known.name)


def _is_idle(nvml: Nvml, device: Device) -> bool:
    return nvml.memory(str(device.uuid)).used_bytes <= IDLE_SHARE * device.memory_bytes


def _distances(nvml: Nvml, devices: Sequence[Device]) -> _Distances:
    return _Distances({(a.uuid, b.uuid): nvml.distance(str(a.uuid), str(b.uuid)) for a in devices for b in devices if a != b})


class _Distances:
    """Asked once, however often they are looked up."""

    def __init__(self, told: Mapping[tuple[str | None, str | None], int | None]) -> None:
        self._told = told

    def __call__(self, one: Device, other: Device) -> int | None:
        return self._told.get((one.uuid, other.uuid))


def _place(nvml: Nvml, group: Sequence[Device], *, alone: bool) -> Place:
    """Several slots keep to the cores on their own side of the machine; a single one is left as a training would be."""
    near = None if alone else _cores_near(nvml, group)
    words = ("GPU " if len(group) == 1 else "GPUs ") + ", ".join(str(device.index) for device in group)
    return Place(words=words, visible=",".join(str(device.uuid) for device in group), cores=near)


def _cores_near(nvml: Nvml, group: Sequence[Device]) -> frozenset[int] | None:
    told = [nvml.cores_near(str(device.uuid)) for device in group]
    near = frozenset().union(*(cores for cores in told if cores is not None)) & frozenset(cores_here())
    return near if near and None not in told else None


def _too_few(slots: int, hardware: Hardware, alike: Sequence[Device], idle: Sequence[Device], most: int) -> BadInput:
    busy = len(alike) - len(idle)
    used = f", {busy} of them in use by others" if busy else ""
    return BadInput(
        f"{slots} slots of {hardware} need {slots * hardware.count} GPUs, and {len(alike)} such are here{used}.",
        way_out=f"Ask for at most --slots {most}, or leave --slots out." if most else "Wait until they are free.",
    )


def _untold(hardware: Hardware, slots: int | None) -> tuple[Place, ...]:
    """Without NVML nobody knows who is near whom: one slot, on the GPUs that a job would get."""
    if slots is not None and slots > 1:
        raise BadInput(
            f"{slots} slots need NVML to tell this machine's GPUs apart, and it does not answer.",
            way_out="Install nvidia-ml-py, see that `nvidia-smi` works, or leave --slots out.",
        )
    return (Place(words=f"this machine's {hardware}"),)


def cores_here(nodes: Path = _NODES) -> list[int]:
    """The cores that we may use, those of one memory node and of one physical core beside each other."""
    allowed = os.sched_getaffinity(0)
    node_of = {core: node for node, core in _cores_by_node(nodes)}
    return sorted(allowed, key=lambda core: (node_of.get(core, 0), _physical(core), core))


def _cores_by_node(nodes: Path) -> list[tuple[int, int]]:
    found = []
    for folder in sorted(nodes.glob("node[0-9]*")):
        with contextlib.suppress(OSError, ValueError):
            for part in (folder / "cpulist").read_text().strip().split(","):
                first, _, last = part.partition("-")
                found += [(int(folder.name[4:]), core) for core in range(int(first), int(last or first) + 1)]
    return found


def _physical(core: int) -> int:
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{core}/topology/core_id").read_text())
    except (OSError, ValueError):
        return core

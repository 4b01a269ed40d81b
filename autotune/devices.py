"""The NVIDIA GPUs of this machine, as a job started here would see them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.errors import HardwareNotHere
from autotune.nvml import Card, CardLost, NotTold, Nvml, NvmlUnavailable
from autotune.units import MIB

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU of this machine, as the driver describes it, or one slice of a GPU that is cut by MIG."""

    name: str
    memory_bytes: int
    index: int | None = None
    """As nvidia-smi counts; a slice has its GPU's."""

    uuid: str | None = None
    reserved_bytes: int | None = None
    """Of the memory, what the driver and error correction keep; None where nobody says."""

    compute_capability: str | None = None
    driver_version: str | None = None
    slice_of: str | None = None
    """The UUID of the whole GPU; None for a whole one."""


def devices_here(library: Any = None, variable: str | None = None) -> tuple[Device, ...]:
    """By NVML, by nvidia-smi where NVML is absent. HardwareNotHere where there is a driver and it does not answer.

    `variable` is CUDA_VISIBLE_DEVICES, the environment's own unless given.
    """
    chosen = os.environ.get(VISIBLE) if variable is None else variable
    try:
        nvml = Nvml.open(library)
    except NvmlUnavailable as reason:
        if not reason.absent:
            raise _unreadable(reason) from reason
        return visible(_by_nvidia_smi(), chosen)
    with contextlib.closing(nvml):
        try:
            return devices_of(nvml, chosen)
        except (NotTold, CardLost) as reason:
            raise _unreadable(reason) from reason


def devices_of(nvml: Nvml, variable: str | None) -> tuple[Device, ...]:
    """Those that CUDA shows under this CUDA_VISIBLE_DEVICES, over a connection that is open."""
    version = nvml.driver_version()
    return visible([_device(card, version) for card in nvml.cards()], variable)


def visible(devices: Sequence[Device], variable: str | None) -> tuple[Device, ...]:
    """Those that CUDA shows under this CUDA_VISIBLE_DEVICES, in its order: it stops at the first that is not there."""
    if variable is None:
        return tuple(devices)
    seen: list[Device] = []
    for part in variable.split(","):
        named = _named(part.strip(), devices)
        if not named:
            break
        seen += named
    return tuple(seen)


def _named(part: str, devices: Sequence[Device]) -> list[Device]:
    """By index, or by UUID, of which the beginning will do; the index of a GPU that is cut stands for all of its slices."""
    if part.isdigit():
        return [device for device in devices if device.index == int(part)]
    alike = [device for device in devices if device.uuid is not None and part and device.uuid.startswith(part)]
    return alike if len(alike) == 1 else []


def _device(card: Card, driver_version: str) -> Device:
    return Device(
        name=card.name, memory_bytes=card.total_bytes, index=card.index, uuid=card.uuid, reserved_bytes=card.reserved_bytes,
        compute_capability=card.compute_capability, driver_version=driver_version, slice_of=card.slice_of,
    )  # fmt: skip


def _unreadable(reason: Exception) -> HardwareNotHere:
    return HardwareNotHere(
        f"This machine has an NVIDIA driver, and it can't be asked for its GPUs ({reason}).",
        way_out="See that `nvidia-smi` works (a driver that was updated needs a restart), or type --gpus cpu.",
    )


def _by_nvidia_smi() -> list[Device]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    rows = [[cell.strip() for cell in line.split(",", 3)] for line in answer.splitlines() if line.count(",") >= 3]
    return [
        Device(name=name, memory_bytes=int(mib) * MIB, index=int(index), uuid=uuid)
        for index, uuid, mib, name in rows
        if mib.isdigit() and index.isdigit()
    ]

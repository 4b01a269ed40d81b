"""NVIDIA GPUs of this machine that are visible to a job."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from autotune.core.errors import HardwareNotHere
from autotune.core.units import MIB
from autotune.machine.nvml import Device, GpuLost, Nvml, NvmlNotSupported, NvmlUnavailable

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Makes CUDA's numbers equal to the driver's; set in probes, hence in the written launch too."""


def devices_here(library: Any = None, variable: str | None = None) -> tuple[Device, ...]:
    """Return the visible GPUs from NVML, or from nvidia-smi without NVML.

    Raises HardwareNotHere when a driver is present and does not answer. `variable` overrides CUDA_VISIBLE_DEVICES.
    """
    chosen = os.environ.get(VISIBLE) if variable is None else variable
    try:
        with contextlib.closing(Nvml.open(library)) as nvml:
            return devices_of(nvml, chosen)
    except (NvmlUnavailable, NvmlNotSupported, GpuLost) as reason:
        if isinstance(reason, NvmlUnavailable) and reason.absent:
            return visible(_by_nvidia_smi(), chosen)
        raise HardwareNotHere(
            f"This machine has an NVIDIA driver, and it can't be asked for its GPUs ({reason}).",
            way_out="See that `nvidia-smi` works (a driver that was updated needs a restart), or type --gpus cpu.",
        ) from reason


def devices_of(nvml: Nvml, variable: str | None) -> tuple[Device, ...]:
    """Return the GPUs that CUDA shows under this CUDA_VISIBLE_DEVICES, over an open connection."""
    version = nvml.driver_version()
    return visible([replace(card, driver_version=version) for card in nvml.cards()], variable, nvml.unreadable)


def visible(devices: Sequence[Device], variable: str | None, unreadable: Collection[int] = ()) -> tuple[Device, ...]:
    """Filter by CUDA_VISIBLE_DEVICES, in its order. Like CUDA, stop at the first unknown entry; the
    numbers of `unreadable` GPUs are known."""
    if variable is None:
        return tuple(devices)
    seen: list[Device] = []
    for part in variable.split(","):
        if part.strip().isdigit() and int(part) in unreadable:
            continue
        named = _named(part.strip(), devices)
        if not named:
            break
        seen += named
    return tuple(seen)


def _named(part: str, devices: Sequence[Device]) -> list[Device]:
    """Match an index or a UUID prefix. The index of a GPU with MIG matches all of its slices."""
    if part.isdigit():
        return [device for device in devices if device.index == int(part)]
    alike = [device for device in devices if device.uuid is not None and part and device.uuid.startswith(part)]
    return alike if len(alike) == 1 else []


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

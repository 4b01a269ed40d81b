"""Memory of other processes on the GPUs, and notes about it before any measurement."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from autotune.core.errors import ProbeError
from autotune.core.job import Hardware
from autotune.core.units import format_bytes
from autotune.machine.devices import VISIBLE
from autotune.machine.nvml import GpuLost, NvmlNotSupported, named
from autotune.probe.gpu_set import Gpus, needs_ballast


def gpu_notes(hardware: Hardware, limit_bytes: int, *, library: object = None) -> tuple[str, ...]:
    """Describe other processes on the GPUs, and the enforcement of a limit below their size."""
    if hardware.kind != "cuda" or not hardware.here:
        return ()
    try:
        gpus = Gpus(hardware.count, limit_bytes, Path(sys.executable), library=library)
    except ProbeError as error:
        return (str(error),)
    with contextlib.closing(gpus):
        # GPUs that NVML counts and that cannot be used, as far as the user chose them.
        chosen = os.environ.get(VISIBLE)
        wanted = None if chosen is None else {part.strip() for part in chosen.split(",")}
        left_out = {} if gpus.nvml is None else gpus.nvml.unreadable
        notes = [f"GPU {index} is left out: {why}" for index, why in left_out.items() if wanted is None or str(index) in wanted]
        notes += [*_others(gpus), *_limit(gpus, hardware)]
        if gpus.nvml is None:
            notes.append(
                f"NVML is not in use ({gpus.why_not}): memory is what torch and CUDA report to each rank, "
                "and other processes are not visible"
            )
        return tuple(notes)


def held_by_others(hardware: Hardware, limit_bytes: int) -> tuple[int, ...] | None:
    """Return the bytes of other processes by GPU, 0 below MIN_REPORTED_BYTES; None: unknown."""
    try:
        gpus = Gpus(hardware.count, limit_bytes, Path(sys.executable))
    except ProbeError:
        return None
    with contextlib.closing(gpus), contextlib.suppress(NvmlNotSupported, GpuLost):
        gpus.look()  # without NVML it reads nothing, and every figure below is None
        held = [slot.others_bytes for slot in gpus.slots]
        return None if None in held else tuple(one for one in held if one is not None)
    return None


def _others(gpus: Gpus) -> list[str]:
    try:
        gpus.look()
    except (NvmlNotSupported, GpuLost) as error:
        return [f"a GPU can't be read: {error}"]
    notes = []
    for slot in gpus.slots:
        if held := slot.others_bytes:
            left = (slot.total_bytes or 0) - held
            bound = f": the limit there is {format_bytes(left)}" if left < gpus.limit_bytes else ""
            others = named(slot.others_in_words(gpus.nvml))
            notes.append(f"others hold {format_bytes(held)} of {slot.words} ({others}){bound}")
    return notes


def _limit(gpus: Gpus, hardware: Hardware) -> list[str]:
    if not needs_ballast(gpus.limit_bytes, hardware.memory_bytes):
        return []
    limit, name = format_bytes(gpus.limit_bytes), hardware.name
    if any(slot.exclusive for slot in gpus.slots):
        return [(
            f"these GPUs serve one process at a time, so no ballast can hold the memory beyond {limit}: torch's allocator is "
            "capped, NCCL and an engine in sleep mode are not; `nvidia-smi -c DEFAULT` lifts that"
        )]  # fmt: skip
    return [(
        f"all but {limit} of each {name} is held back: what fits here fits a card of {limit}; "
        f"speeds are those of {name}, and so are the workspaces of its kernels"
    )]  # fmt: skip

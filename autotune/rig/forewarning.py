"""What the asker should know about the GPUs before anything is measured on them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from autotune.errors import RigError
from autotune.hardware import Hardware
from autotune.nvml import CardLost, NotTold
from autotune.rig.gpus import Gpus, Slot
from autotune.rig.neighbours import named
from autotune.rig.small_card import needs_ballast
from autotune.units import format_bytes


def gpu_notes(hardware: Hardware, limit_bytes: int, *, library: object = None) -> tuple[str, ...]:
    """Who else is on them, and how they will be held to a limit below their size; nothing where probes use none of them."""
    if hardware.kind != "cuda" or not hardware.here:
        return ()
    try:
        gpus = Gpus(hardware.count, limit_bytes, Path(sys.executable), library=library)
    except RigError as error:
        return (str(error),)
    with contextlib.closing(gpus):
        return (*_neighbours(gpus), *_limit(gpus, hardware), *_blindness(gpus))


def _neighbours(gpus: Gpus) -> list[str]:
    try:
        gpus.look()
    except (NotTold, CardLost) as error:
        return [f"a GPU can't be read: {error}"]
    return [_who(gpus, slot) for slot in gpus.slots if slot.others_bytes]


def _who(gpus: Gpus, slot: Slot) -> str:
    held, left = slot.others_bytes or 0, (slot.total_bytes or 0) - (slot.others_bytes or 0)
    what = f"others hold {format_bytes(held)} of {slot.words} ({named(slot.others_in_words(gpus.nvml))})"
    return f"{what}: the limit there is {format_bytes(left)}" if left < gpus.limit_bytes else what


def _limit(gpus: Gpus, hardware: Hardware) -> list[str]:
    if not needs_ballast(gpus.limit_bytes, hardware.memory_bytes):
        return []
    limit, name = format_bytes(gpus.limit_bytes), hardware.name
    if any(slot.taken_alone for slot in gpus.slots):
        alone = f"these GPUs serve one process at a time, so nothing can hold what is beyond {limit}"
        return [
            f"{alone}: torch's allocator is capped, NCCL and an engine that sleeps are not; `nvidia-smi -c DEFAULT` lifts that"
        ]
    held = f"all but {limit} of each {name} is held back: what fits here fits a card of {limit}"
    return [f"{held}; speeds are those of {name}, and so are the workspaces of its kernels"]


def _blindness(gpus: Gpus) -> list[str]:
    if gpus.nvml is not None:
        return []
    return [f"NVML was not asked ({gpus.why_not}): memory will be what torch and CUDA tell each rank, and others are not seen"]

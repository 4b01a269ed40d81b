"""What others hold of the GPUs now: what a measurement of then must be held against."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from autotune.errors import RigError
from autotune.hardware import Hardware
from autotune.nvml import CardLost, NotTold
from autotune.rig.gpus import Gpus


def held_by_others(hardware: Hardware, limit_bytes: int, *, library: object = None) -> tuple[int, ...] | None:
    """Bytes by GPU, in the ranks' order, nothing where it is too little to name; None where nobody can tell."""
    try:
        gpus = Gpus(hardware.count, limit_bytes, Path(sys.executable), library=library)
    except RigError:
        return None
    with contextlib.closing(gpus):
        if gpus.nvml is None:
            return None
        try:
            gpus.look()
        except (NotTold, CardLost):
            return None
        held = [slot.others_bytes for slot in gpus.slots]
    return None if None in held else tuple(one for one in held if one is not None)

"""The TRL adapter with one rank in trouble, which really happens there: no memory left, or asleep inside a collective.

What kind is in TROUBLE; it comes over the second rank alone, and over candidates that accumulate two micro-steps.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from pathlib import Path
from typing import Any

from autotune_inside.adapters import trl_grpo  # type: ignore[import-not-found]
from autotune_inside.adapters.trl_grpo import load, release, supported, warm  # type: ignore[import-not-found] # noqa: F401

AGES = 3600
LEFT_BYTES = 24 * 2**20


def measure(loaded: Any, request: Any, stage: Any) -> Any:
    if stage.rank == 1 and request["settings"]["gradient_accumulation_steps"] == 2:
        TROUBLES[os.environ["TROUBLE"]]()
    return trl_grpo.measure(loaded, request, stage)


def short_of_memory() -> None:
    """This rank alone may grow by so much and no further; torch's allocator is refused the rest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    data = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (data + LEFT_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def asleep_in_python() -> None:
    in_every_gather(lambda: time.sleep(AGES))


def asleep_in_c() -> None:
    """With the interpreter's lock held: no Python code of this process runs any more."""
    in_every_gather(lambda: ctypes.PyDLL(None).sleep(AGES))


def in_every_gather(sleep: Any) -> None:
    """Inside the collective: the other rank is waiting in it already, or soon will."""
    import torch.distributed as dist

    def gather(*_: Any, **__: Any) -> None:
        sleep()

    dist.all_gather_into_tensor = gather
    dist.all_gather = gather


TROUBLES = {"memory": short_of_memory, "python": asleep_in_python, "c": asleep_in_c}

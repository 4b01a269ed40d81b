"""TRL adapter with a real fault on one rank: no memory, or a sleep inside a collective.

The environment variable TROUBLE selects the fault. It affects the second rank, and candidates that
accumulate two micro-steps.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from pathlib import Path
from typing import Any

from autotune_worker.trl import grpo_probe  # type: ignore[import-not-found]
from autotune_worker.trl.grpo_probe import (  # type: ignore[import-not-found]
    load,  # noqa: F401
    release,  # noqa: F401
    supported,  # noqa: F401
    warm,  # noqa: F401
)

AGES = 3600
LEFT_BYTES = 24 * 2**20


def measure(
    loaded: Any,
    request: Any,
    stage: Any,
) -> Any:
    if stage.rank == 1 and request["settings"]["gradient_accumulation_steps"] == 2:
        TROUBLES[os.environ["TROUBLE"]]()
    return grpo_probe.measure(loaded, request, stage)


def short_of_memory() -> None:
    """Limit the growth of this rank; torch's allocator gets an error beyond it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    data = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    resource.setrlimit(
        resource.RLIMIT_DATA, (data + LEFT_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1])
    )


def asleep_in_python() -> None:
    in_every_gather(lambda: time.sleep(AGES))


def asleep_in_c() -> None:
    """Sleep with the interpreter's lock held: no Python code of this process runs any more."""
    in_every_gather(lambda: ctypes.PyDLL(None).sleep(AGES))


def in_every_gather(sleep: Any) -> None:
    """Sleep inside the collective, while the other rank waits in it."""
    import torch.distributed as dist

    def gather(*_: Any, **__: Any) -> None:
        sleep()

    dist.all_gather_into_tensor = gather
    dist.all_gather = gather


TROUBLES = {"memory": short_of_memory, "python": asleep_in_python, "c": asleep_in_c}

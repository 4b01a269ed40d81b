"""Soft memory limit: an allocation beyond it fails with the framework's own error.

A cgroup kills a process that crosses its limit. RLIMIT_DATA refuses the memory instead, so torch raises its usual
error, the rank frees everything, and the next candidate runs on the same loaded model. It counts mapped memory, touched
or not; beside a cgroup it therefore gets slack and refuses only what is far too large.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path

# Default of glibc under `ulimit -s unlimited`. The usual 8 MiB are hardly touched, but RLIMIT_DATA counts them whole.
THREAD_STACK_BYTES = 2 * 2**20
STATUS = Path("/proc/self/status")


def status() -> dict[str, int]:
    """Return the sizes in /proc/self/status, in bytes."""
    fields = (line.split(":", 1) for line in STATUS.read_text().splitlines() if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in fields}


def own_bytes() -> int:
    """Anonymous and shared memory of this process: RssAnon + RssShmem."""
    sizes = status()
    return sizes["RssAnon"] + sizes["RssShmem"]


def give_back() -> None:
    """Collect garbage, and return the allocator's free pages to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def keep_thread_stacks_small() -> None:
    """Reserve little stack for threads started from here on; no effect outside glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "pthread_setattr_default_np"):
        attributes = ctypes.create_string_buffer(256)  # larger than any pthread_attr_t
        libc.pthread_attr_init(attributes)
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(THREAD_STACK_BYTES))
        libc.pthread_setattr_default_np(attributes)


class Guard:
    """Context that limits new mappings to `growth_bytes + slack_bytes`; None sets no limit.

    The slack is for mappings that are never touched: TRL's loss, for example, maps 32,768 tokens of
    vocabulary and uses as many as the model has.
    """

    def __init__(self, growth_bytes: int | None, slack_bytes: int = 0) -> None:
        self._growth_bytes = None if growth_bytes is None else growth_bytes + slack_bytes
        self._before = resource.getrlimit(resource.RLIMIT_DATA)

    def __enter__(self) -> Guard:
        if self._growth_bytes is not None:
            ceiling = status()["VmData"] + max(0, self._growth_bytes)
            hard = self._before[1]
            if hard == resource.RLIM_INFINITY or ceiling < hard:
                resource.setrlimit(resource.RLIMIT_DATA, (ceiling, hard))
        return self

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._before)

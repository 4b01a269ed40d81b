"""The soft edge of the memory limit: an allocation beyond it fails inside the process, with the framework's own error.

A cgroup ends a process that crosses its limit. RLIMIT_DATA refuses the memory instead, so torch
raises what it raises on any machine that is full, the rank can give everything back, and the next
candidate runs on the same loaded model. It counts what is mapped, touched or not, so beside a cgroup
it has slack and refuses only what could not fit by far; the cgroup decides the rest, exactly.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path
from types import TracebackType

THREAD_STACK_BYTES = 2 * 2**20
"""What glibc takes where `ulimit -s` says unlimited. The usual 8 MiB are hardly touched, but RLIMIT_DATA counts them whole."""


def own_bytes() -> int:
    """Anonymous and shared memory of this process, in bytes: RssAnon + RssShmem."""
    status = _status()
    return status["RssAnon"] + status["RssShmem"]


def give_back() -> None:
    """Collect what nothing refers to, and hand the allocator's free pages to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def keep_thread_stacks_small() -> None:
    """Threads started from here on reserve little; a no-op outside glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "pthread_setattr_default_np"):
        attributes = ctypes.create_string_buffer(256)  # larger than any pthread_attr_t
        libc.pthread_attr_init(attributes)
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(THREAD_STACK_BYTES))
        libc.pthread_setattr_default_np(attributes)


class Guard:
    """Within it, this process may map so many bytes more and no further; None guards nothing.

    `slack_bytes` is for mappings that are never touched, where something else counts what is: TRL's loss, say, asks for
    room for 32,768 tokens of vocabulary and uses what the model has.
    """

    def __init__(self, growth_bytes: int | None, slack_bytes: int = 0) -> None:
        self._growth_bytes = None if growth_bytes is None else growth_bytes + slack_bytes
        self._before = resource.getrlimit(resource.RLIMIT_DATA)

    def __enter__(self) -> Guard:
        if self._growth_bytes is not None:
            ceiling = _status()["VmData"] + max(0, self._growth_bytes)
            hard = self._before[1]
            if hard == resource.RLIM_INFINITY or ceiling < hard:
                resource.setrlimit(resource.RLIMIT_DATA, (ceiling, hard))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._before)


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in fields}

"""What this process holds in memory, and the most it held since it was last asked.

On the CPU that is anonymous plus shared memory: what a limit is held against. File-backed pages
(the libraries) come and go with the kernel's cache and are left out. On a GPU it is what torch's
allocator reserved, plus what the device shows beyond it (context, NCCL, an engine's own pool).
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_HIGH_WATER_MARK = "5"
"""Linux: "To reset the peak resident set size ("high water mark") to the process's current value"."""


class Meter(Protocol):
    """One process's memory."""

    def now(self) -> int:
        """Bytes held at this moment."""
        ...

    def take_peak(self) -> int:
        """The most bytes held since the last call; begins anew."""
        ...

    def totals(self) -> Mapping[str, int | None]:
        """torch's own figures, None where torch keeps none: torch_allocated_bytes, torch_reserved_bytes, allocation_retries."""
        ...

    def close(self) -> None: ...


def resident() -> dict[str, int]:
    """The Rss* and VmHWM lines of this process, in bytes."""
    figures = {}
    for line in STATUS.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.startswith("Rss") or name == "VmHWM":
            figures[name] = int(rest.split()[0]) * 1024
    return figures


class ProcessMeter:
    """Exact peaks from the kernel's own high-water mark, which is reset at every reading."""

    def __init__(self) -> None:
        CLEAR_REFS.write_text(RESET_HIGH_WATER_MARK)

    def now(self) -> int:
        figures = resident()
        return figures["RssAnon"] + figures["RssShmem"]

    def take_peak(self) -> int:
        figures = resident()
        CLEAR_REFS.write_text(RESET_HIGH_WATER_MARK)
        held = figures["RssAnon"] + figures["RssShmem"]
        # The mark counts file pages too; they only grow while libraries are first touched, so what is mapped now was mapped then.
        return max(held, figures["VmHWM"] - figures["RssFile"])

    def totals(self) -> Mapping[str, int | None]:
        return {"torch_allocated_bytes": None, "torch_reserved_bytes": None, "allocation_retries": None}

    def close(self) -> None:
        return None


class SamplingMeter(ProcessMeter):
    """Where the high-water mark cannot be reset: a thread looks often. Peaks shorter than its interval are missed."""

    INTERVAL_SECONDS = 0.002

    def __init__(self) -> None:
        self._peak = self.now()
        self._over = threading.Event()
        # The thread must not keep its meter alive: a meter that nobody holds any more ends it.
        self._thread = threading.Thread(target=_look, args=(weakref.ref(self), self._over), name="memory-meter", daemon=True)
        self._thread.start()

    def take_peak(self) -> int:
        held = self.now()
        peak, self._peak = max(self._peak, held), held
        return peak

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=1)


def _look(reference: weakref.ref[SamplingMeter], over: threading.Event) -> None:
    while not over.wait(SamplingMeter.INTERVAL_SECONDS):
        meter = reference()
        if meter is None:
            return
        meter._peak = max(meter._peak, meter.now())


class CudaMeter:
    """torch's allocator statistics of the current device, and what lies outside them."""

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self._allocated = self._reserved = 0
        self._retries_before = self._retries()
        self._cuda.reset_peak_memory_stats()

    def _retries(self) -> int:
        return int(self._cuda.memory_stats().get("num_alloc_retries", 0))

    def _outside_torch(self) -> int:
        free, total = self._cuda.mem_get_info()
        return max(0, int(total) - int(free) - int(self._cuda.memory_reserved()))

    def now(self) -> int:
        # What is allocated, not what is reserved: a cached block can still be given to whoever asks next.
        return int(self._cuda.memory_allocated()) + self._outside_torch()

    def take_peak(self) -> int:
        self._allocated = max(self._allocated, int(self._cuda.max_memory_allocated()))
        reserved = int(self._cuda.max_memory_reserved())
        self._reserved = max(self._reserved, reserved)
        peak = reserved + self._outside_torch()
        self._cuda.reset_peak_memory_stats()
        return peak

    def totals(self) -> Mapping[str, int | None]:
        return {
            "torch_allocated_bytes": self._allocated,
            "torch_reserved_bytes": self._reserved,
            "allocation_retries": self._retries() - self._retries_before,
        }

    def close(self) -> None:
        return None


def cpu_meter() -> Meter:
    """The exact meter where this kernel allows it, the sampling one elsewhere."""
    try:
        return ProcessMeter()
    except OSError:
        return SamplingMeter()


def give_back(torch: Any = None) -> None:
    """Return what is free to the system, so that the next candidate begins where this one did."""
    gc.collect()
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return  # not glibc: nothing to trim

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

    def take_torch(self) -> dict[str, int | None] | None:
        """torch's own figures since `take_peak`, before which it is to be called; None where torch keeps none."""
        ...

    def totals(self) -> Mapping[str, Any]:
        """torch's own figures since the start, None where torch keeps none."""
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

    def take_torch(self) -> dict[str, int | None] | None:
        return None

    def totals(self) -> Mapping[str, Any]:
        return {
            "torch_allocated_bytes": None,
            "torch_reserved_bytes": None,
            "allocation_retries": None,
            "allocation_failures": None,
        }

    def close(self) -> None:
        return None


class SamplingMeter(ProcessMeter):
    """Where the high-water mark cannot be reset: a thread looks often. Peaks shorter than its interval are missed."""

    INTERVAL_SECONDS = 0.002

    def __init__(self) -> None:
        self._peak = self.now()
        # What was looked at before a peak was taken must not count after it.
        self._looking = threading.Lock()
        self._over = threading.Event()
        # The thread must not keep its meter alive: a meter that nobody holds any more ends it.
        self._thread = threading.Thread(target=_look, args=(weakref.ref(self), self._over), name="memory-meter", daemon=True)
        self._thread.start()

    def take_peak(self) -> int:
        with self._looking:
            held = self.now()
            peak, self._peak = max(self._peak, held), held
        return peak

    def look(self) -> None:
        with self._looking:
            self._peak = max(self._peak, self.now())

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=1)


def _look(reference: weakref.ref[SamplingMeter], over: threading.Event) -> None:
    while not over.wait(SamplingMeter.INTERVAL_SECONDS):
        meter = reference()
        if meter is None:
            return
        meter.look()
        del meter  # held while waiting, it would never be let go


SLEEP_MISLEADS = "vLLM's sleep mode: torch counts as reserved what sleeps and is not on the device"


class CudaMeter:
    """torch's allocator statistics of the current device, and what lies outside them.

    `others_bytes` of the device are not this process's. Where an engine `sleeps`, torch's reserved figure misleads, and the
    peak is what the device showed at the moments it was asked: a bound from below, which whoever samples from outside lifts.
    """

    def __init__(self, torch: Any, *, others_bytes: int | None = None, sleeps: bool = False) -> None:
        self._cuda = torch.cuda
        self._others_bytes = others_bytes or 0
        self._sleeps = sleeps
        self._allocated = self._reserved = 0
        self._counts_before = self._turn_before = self._counts()
        self._cuda.reset_peak_memory_stats()

    def now(self) -> int:
        # What is allocated, not what is reserved: a cached block can still be given to whoever asks next.
        return max(0, self._held() - int(self._cuda.memory_reserved())) + int(self._cuda.memory_allocated())

    def take_torch(self) -> dict[str, int | None] | None:
        retries, failures = self._counts()
        before, self._turn_before = self._turn_before, (retries, failures)
        return {
            "allocated_bytes": int(self._cuda.max_memory_allocated()),
            "reserved_bytes": None if self._sleeps else int(self._cuda.max_memory_reserved()),
            "retries": retries - before[0],
            "out_of_memory": failures - before[1],
        }

    def take_peak(self) -> int:
        self._allocated = max(self._allocated, int(self._cuda.max_memory_allocated()))
        reserved = int(self._cuda.max_memory_reserved())
        self._reserved = max(self._reserved, reserved)
        given_back = 0 if self._sleeps else reserved - int(self._cuda.memory_reserved())
        self._cuda.reset_peak_memory_stats()
        return self._held() + given_back

    def totals(self) -> Mapping[str, Any]:
        retries, failures = self._counts()
        return {
            "torch_allocated_bytes": self._allocated,
            "torch_reserved_bytes": None if self._sleeps else self._reserved,
            "torch_reserved_why": SLEEP_MISLEADS if self._sleeps else None,
            "allocation_retries": retries - self._counts_before[0],
            "allocation_failures": failures - self._counts_before[1],
            "device_uuid": device_uuid(self._cuda),
        }

    def close(self) -> None:
        return None

    def _held(self) -> int:
        """Of the device's memory, what is ours."""
        free, total = self._cuda.mem_get_info()
        return max(0, int(total) - int(free) - self._others_bytes)

    def _counts(self) -> tuple[int, int]:
        counted = self._cuda.memory_stats()
        return int(counted.get("num_alloc_retries", 0)), int(counted.get("num_ooms", 0))


def device_uuid(cuda: Any) -> str | None:
    """Which GPU this is, as NVML names it; None where this torch does not say."""
    uuid = getattr(cuda.get_device_properties(cuda.current_device()), "uuid", None)
    return None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"


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

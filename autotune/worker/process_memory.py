"""Memory of this process: current and peak figures, a soft limit, and a check that a candidate left
nothing behind.

CPU: anonymous plus shared memory, which limits are compared with. File-backed pages (the libraries)
depend on the kernel's cache and are left out. GPU: the memory reserved by torch's allocator, plus
the rest of the process's share of the device (context, NCCL, an engine's own pool).

A cgroup kills a process that crosses its limit. RLIMIT_DATA refuses the memory instead, so torch
raises its usual error, the rank frees everything, and the next candidate runs on the same loaded
model. It counts mapped memory, touched or not; beside a cgroup it therefore gets slack and refuses
only what is far too large.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Default of glibc under `ulimit -s unlimited`. The usual 8 MiB are hardly touched, but RLIMIT_DATA
# counts them whole.
THREAD_STACK_BYTES = 2 * 2**20


def status(file: Path = Path("/proc/self/status")) -> dict[str, int]:
    """Return the sizes in /proc/PID/status, in bytes."""
    sizes = {}
    for line in file.read_text().splitlines():
        if line.endswith(" kB"):
            name, _, value = line.partition(":")
            kibibytes = int(value.split()[0])
            sizes[name] = kibibytes * 1024
    return sizes


def sizes_of_process(pid: int) -> dict[str, int]:
    """Return the sizes of a process in bytes; empty for one that has ended."""
    try:
        return status(Path(f"/proc/{pid}/status"))
    except OSError:
        return {}


def own_bytes() -> int:
    """Anonymous and shared memory of this process: RssAnon + RssShmem."""
    sizes = status()
    return sizes["RssAnon"] + sizes["RssShmem"]


def give_back(torch: Any = None) -> None:
    """Collect garbage, and return free memory to the system, so that the next candidate starts
    at the same level.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


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
        self._growth_bytes = growth_bytes
        self._slack_bytes = slack_bytes
        self._before = resource.getrlimit(resource.RLIMIT_DATA)

    def __enter__(self) -> Guard:
        if self._growth_bytes is not None:
            growth_bytes = max(0, self._growth_bytes + self._slack_bytes)
            ceiling = status()["VmData"] + growth_bytes
            _, hard_limit = self._before
            if hard_limit == resource.RLIM_INFINITY or ceiling < hard_limit:
                resource.setrlimit(resource.RLIMIT_DATA, (ceiling, hard_limit))
        return self

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._before)


CLEAR_REFS = Path("/proc/self/clear_refs")
# Linux: "To reset the peak resident set size ("high water mark") to the process's current value".
RESET_HIGH_WATER_MARK = "5"
TORCH_TOTALS = (
    "torch_allocated_bytes",
    "torch_reserved_bytes",
    "allocation_retries",
    "allocation_failures",
)


class MemoryMeter:
    """Memory of one process; without figures of torch, unless a subclass has them."""

    def now(self) -> int:
        """Return the bytes held at this moment."""
        raise NotImplementedError

    def take_peak(self) -> int:
        """Return the peak since the last call, and start a new one."""
        raise NotImplementedError

    def take_torch(self) -> dict[str, int | None] | None:
        """Return torch's figures since `take_peak`, to be called before it; None without any."""
        return None

    def totals(self) -> Mapping[str, Any]:
        """Return torch's figures since the start, with None for those that do not exist."""
        return dict.fromkeys(TORCH_TOTALS)

    def close(self) -> None:
        """End the measurement."""


class HighWaterMeter(MemoryMeter):
    """Exact peaks from the kernel's high-water mark, which is reset at each reading."""

    def __init__(self) -> None:
        CLEAR_REFS.write_text(RESET_HIGH_WATER_MARK)

    def now(self) -> int:
        return own_bytes()

    def take_peak(self) -> int:
        sizes = status()
        CLEAR_REFS.write_text(RESET_HIGH_WATER_MARK)
        current = sizes["RssAnon"] + sizes["RssShmem"]
        # The mark includes file pages. They only grow, at the first touch of a library, so those of
        # now bound those of then.
        peak = sizes["VmHWM"] - sizes["RssFile"]
        return max(current, peak)


class SamplingMeter(HighWaterMeter):
    """Sampling thread, for kernels without a reset. Misses peaks shorter than its interval."""

    INTERVAL_SECONDS = 0.002

    def __init__(self) -> None:
        self._peak = self.now()
        # A sample from before `take_peak` must not count after it.
        self._sampling = threading.Lock()
        self._over = threading.Event()
        # The weak reference lets a meter without other references be collected, which ends the
        # thread.
        self._thread = threading.Thread(
            target=_sample,
            args=(weakref.ref(self), self._over),
            name="memory-meter",
            daemon=True,
        )
        self._thread.start()

    def take_peak(self) -> int:
        with self._sampling:
            current = self.now()
            peak, self._peak = max(self._peak, current), current
        return peak

    def sample(self) -> None:
        with self._sampling:
            current = self.now()
            self._peak = max(self._peak, current)

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=1)


def _sample(reference: weakref.ref[SamplingMeter], over: threading.Event) -> None:
    while not over.wait(SamplingMeter.INTERVAL_SECONDS):
        meter = reference()
        if meter is None:
            return
        meter.sample()
        del meter  # no reference while waiting


SLEEP_MISLEADS = "vLLM's sleep mode: torch counts as reserved what sleeps and is not on the device"


class CudaMeter(MemoryMeter):
    """torch's allocator statistics of the current device, plus the memory outside them.

    `others_bytes` of the device belong to other processes. If an engine `sleeps`, torch's reserved
    figure is wrong and the peak is the largest reading of the device: a lower bound, raised by
    samples from outside.
    """

    def __init__(
        self,
        torch: Any,
        *,
        others_bytes: int | None = None,
        sleeps: bool = False,
    ) -> None:
        self._cuda = torch.cuda
        self._others_bytes = others_bytes or 0
        self._sleeps = sleeps
        self._allocated = self._reserved = 0
        self._counts_before = self._turn_before = self._counts()
        self._cuda.reset_peak_memory_stats()

    def now(self) -> int:
        # Allocated instead of reserved: a cached block is available to the next allocation.
        held_bytes = self._held()
        outside = held_bytes - int(self._cuda.memory_reserved())
        if not self._sleeps:  # below zero where torch's figure is older than the device's
            outside = max(0, outside)
        # Both of torch's figures include offloaded memory, which cancels in the difference.
        allocated_bytes = int(self._cuda.memory_allocated())
        return max(0, outside + allocated_bytes)

    def take_torch(self) -> dict[str, int | None] | None:
        before = self._turn_before
        now = self._counts()
        self._turn_before = now
        reserved = int(self._cuda.max_memory_reserved())
        return {
            "allocated_bytes": int(self._cuda.max_memory_allocated()),
            "reserved_bytes": None if self._sleeps else reserved,
            "retries": now.retries - before.retries,
            "out_of_memory": now.failures - before.failures,
        }

    def take_peak(self) -> int:
        allocated = int(self._cuda.max_memory_allocated())
        reserved = int(self._cuda.max_memory_reserved())
        self._allocated = max(self._allocated, allocated)
        self._reserved = max(self._reserved, reserved)
        # peak = held now + freed since the peak
        # freed = reserved at the peak - reserved now
        freed = 0
        if not self._sleeps:
            freed = reserved - int(self._cuda.memory_reserved())
        self._cuda.reset_peak_memory_stats()
        return self._held() + freed

    def totals(self) -> Mapping[str, Any]:
        before = self._counts_before
        now = self._counts()
        return {
            "torch_allocated_bytes": self._allocated,
            "torch_reserved_bytes": None if self._sleeps else self._reserved,
            "torch_reserved_why": SLEEP_MISLEADS if self._sleeps else None,
            "allocation_retries": now.retries - before.retries,
            "allocation_failures": now.failures - before.failures,
            "device_uuid": device_uuid(self._cuda),
        }

    def _held(self) -> int:
        """Share of this process in the used memory of the device."""
        free, total = self._cuda.mem_get_info()
        used_bytes = int(total) - int(free)
        return max(0, used_bytes - self._others_bytes)

    def _counts(self) -> _AllocationCounts:
        stats = self._cuda.memory_stats()
        retries = stats.get("num_alloc_retries", 0)
        failures = stats.get("num_ooms", 0)
        return _AllocationCounts(int(retries), int(failures))


class _AllocationCounts(NamedTuple):
    """Counts of torch's allocator since the start of the process."""

    retries: int
    failures: int


def device_uuid(cuda: Any) -> str | None:
    """UUID of the current GPU in NVML's form; None if this torch does not report it."""
    properties = cuda.get_device_properties(cuda.current_device())
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        return None
    number = str(uuid).removeprefix("GPU-")
    return f"GPU-{number}"


def cpu_meter() -> MemoryMeter:
    """Return the exact meter if this kernel allows it, else the sampling one."""
    try:
        return HighWaterMeter()
    except OSError:
        return SamplingMeter()


MIB = 2**20

# Workspaces of cuBLAS and cuDNN come from torch at first use and stay: up to 33 MiB per handle.
TORCH_TOLERANCE_BYTES = 256 * MIB
OUTSIDE_TOLERANCE_BYTES = 512 * MIB  # kernels that are loaded at first use stay, too


# Check of a GPU's memory after a candidate: an error can leave unreachable tensors behind. Memory
# allocated by torch has to return to its value after loading. Memory outside torch (contexts,
# library pools, a sleeping engine) may grow once, when the first step loads its kernels, and never
# again.


class MemoryKept(RuntimeError):
    """Memory was not freed: the next candidate needs a new process."""


class IdleMemory(NamedTuple):
    """Memory of this process on its device between measurements."""

    allocated_bytes: int
    reserved_bytes: int
    outside_bytes: int


def idle_memory(cuda: Any) -> IdleMemory:
    """Read `torch.cuda` and the driver (`mem_get_info`), after the cache was emptied."""
    free, total = cuda.mem_get_info()
    reserved = int(cuda.memory_reserved())
    return IdleMemory(
        allocated_bytes=int(cuda.memory_allocated()),
        reserved_bytes=reserved,
        outside_bytes=int(total) - int(free) - reserved,
    )


def check(
    before: IdleMemory,
    now: IdleMemory,
    *,
    first: bool,
) -> IdleMemory:
    """Return the reference for the next check. Raise MemoryKept; `first` may load kernels."""
    allocated = now.allocated_bytes - before.allocated_bytes
    reserved = now.reserved_bytes - before.reserved_bytes
    outside = now.outside_bytes - before.outside_bytes
    if allocated > TORCH_TOLERANCE_BYTES:
        raise MemoryKept(f"torch still holds {allocated} bytes more than after loading")
    if reserved > 2 * TORCH_TOLERANCE_BYTES:
        raise MemoryKept(
            f"torch's cache still holds {reserved} bytes more than after loading: it is in pieces"
        )
    if outside > OUTSIDE_TOLERANCE_BYTES and not first:
        raise MemoryKept(f"outside of torch, {outside} bytes more are held than before")
    outside_bytes = max(now.outside_bytes, before.outside_bytes)
    return before._replace(outside_bytes=outside_bytes)

"""Memory of a run, seen from outside: of its GPUs by process, of its processes on the host.

The counters of the processes themselves are only read. Between two looks, host memory is covered by
the kernel's own high-water marks; a GPU's memory is that of the moment, which torch's cache holds
close to its peak.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autotune.core.measurement import MemorySample
from autotune.guard.ending import HostEvidence
from autotune.machine.host_memory import HostMemory
from autotune.machine.nvml import (
    VISIBLE,
    Device,
    GpuLost,
    Nvml,
    NvmlNotSupported,
    NvmlUnavailable,
    devices_of,
)
from autotune.probe.process_meter import Timeline
from autotune.worker.process_memory import sizes_of_process
from autotune.worker.processes import descendants

NODE_VARIABLES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SKYPILOT_NUM_NODES", "PET_NNODES")
NODE_SETTING = re.compile(r"(?:--nnodes|--num[_-]machines|trainer\.nnodes)[ =](?:\d+:)?(\d+)")
HOST_PLACE = "host"
LOOK_SECONDS = 2.0
# Pause after a look or a glance, in units of its duration: each takes at most 1/400 of one core's
# time.
LOOK_PAUSE = 400


@dataclass(frozen=True, kw_only=True)
class Look:
    """Memory at one moment, at the place with the least room."""

    place: str  # "GPU 0", "host"
    used_bytes: int  # of this run
    peak_bytes: int  # of this run, so far
    limit_bytes: int
    free_bytes: int

    @property
    def margin_bytes(self) -> int:
        """Room beyond the peak, with what others hold now."""
        return self.free_bytes - (self.peak_bytes - self.used_bytes)


@dataclass(frozen=True, kw_only=True)
class AttemptPeaks:
    """Highest memory of an attempt."""

    peak: Look | None = None  # at the place with the least margin; None: never read
    host_bytes: int = 0
    timeline: tuple[MemorySample, ...] = ()


class MemoryWatcher:
    """Watches the processes below one command."""

    def __init__(self) -> None:
        self._host = HostMemory()
        self._nvml: Nvml | None = None
        self._devices: tuple[Device, ...] = ()
        self.unseen = ""  # what cannot be watched here
        try:
            self._nvml = Nvml.open()
            self._devices = devices_of(self._nvml, os.environ.get(VISIBLE))
        except NvmlUnavailable as reason:
            self.unseen = "" if reason.absent else str(reason)
        except (NvmlNotSupported, GpuLost) as reason:
            self.unseen = str(reason)
        self.begin()

    def begin(self) -> None:
        """Begin a new attempt."""
        self._kills = self._host.kills()
        self._peaks: dict[str, int] = {}
        self._looks: list[Look] = []  # the last ones, at the places that count
        self._host_peak = self._most_used = 0
        self._timeline = Timeline()
        self._before = {device.uuid: self._used(device) for device in self._devices}
        self._next = self._next_glance = 0.0
        self._of_others: dict[str, int] = {}

    def look(self, pid: int | None) -> Look | None:
        """Read the memory if it is time to; None: not yet, or nothing can be read.

        Between two looks, glances read the GPUs without their processes.
        """
        started = time.monotonic()
        if pid is None:
            return None
        if started < self._next:
            self._glance(started)
            return None
        pids = [pid, *descendants(pid)]
        host_look = self._host_look(pids)
        self._looks = self._gpu_looks(pids) or [host_look]
        narrowest = min(self._looks, key=lambda look: look.margin_bytes)
        self._timeline.take(narrowest.used_bytes, None)
        ended = time.monotonic()
        self._next = ended + max(LOOK_SECONDS, LOOK_PAUSE * (ended - started))
        return narrowest

    def peaks(self) -> AttemptPeaks:
        """Return the highest memory of this attempt."""
        looks = []
        for look in self._looks:
            peak = max(look.peak_bytes, self._peaks[look.place])  # of a glance since then
            looks.append(replace(look, peak_bytes=peak))
        return AttemptPeaks(
            peak=min(looks, key=lambda look: look.margin_bytes, default=None),
            host_bytes=self._host_peak,
            timeline=self._timeline.moments(),
        )

    def host_evidence(self) -> HostEvidence:
        """Return the machine's evidence about host memory in this attempt."""
        return HostEvidence(
            kills=max(0, self._host.kills() - self._kills),
            was_short=self._host.was_short(self._most_used),
        )

    def are_gpus_idle(self) -> bool:
        """Return True if no GPU of the run computes; also without a GPU."""
        for device in self._devices:
            share = None
            if self._nvml is not None:
                with contextlib.suppress(NvmlNotSupported, GpuLost):
                    share = self._nvml.busy_percent(str(device.uuid))
            if share is None or share > 0:
                return False
        return True

    # GPUs.

    def _glance(self, started: float) -> None:
        """Raise the peak of each GPU; others hold what they held at the last look."""
        if started < self._next_glance:
            return
        for device in self._devices:
            place = f"GPU {device.index}"
            used = self._used(device)
            if used is not None and place in self._of_others:
                used_here = used - self._of_others[place]
                self._peaks[place] = max(used_here, self._peaks.get(place, 0))
        ended = time.monotonic()
        self._next_glance = ended + LOOK_PAUSE * (ended - started)

    def _gpu_looks(self, pids: Iterable[int]) -> list[Look]:
        looks = []
        for device in self._devices:
            used = self._used(device)
            if used is None:
                continue
            used_here = self._of_processes(device, frozenset(pids))
            if used_here is None:
                used_here = max(0, used - (self._before.get(device.uuid) or 0))
            self._of_others[f"GPU {device.index}"] = used - used_here
            usable = device.memory_bytes - (device.reserved_bytes or 0)
            looks.append(self._with_peak(f"GPU {device.index}", used_here, usable, usable - used))
        return looks

    def _used(self, device: Device) -> int | None:
        if self._nvml is None or device.uuid is None:
            return None
        with contextlib.suppress(NvmlNotSupported, GpuLost):
            return self._nvml.used_bytes(device.uuid)
        return None

    def _of_processes(self, device: Device, pids: frozenset[int]) -> int | None:
        """Return the bytes of these processes; None where NVML lists none of them."""
        if self._nvml is None:
            return None
        listed: dict[int, int | None] = {}
        with contextlib.suppress(NvmlNotSupported, GpuLost):
            listed = self._nvml.processes(str(device.uuid))
        used_here = [used for pid, used in listed.items() if pid in pids]
        if not used_here or None in used_here:
            return None
        return sum(used or 0 for used in used_here)

    # Host.

    def _host_look(self, pids: Iterable[int]) -> Look:
        used = 0
        beyond = 0  # of the process that was furthest above what it holds now
        for pid in pids:
            sizes = sizes_of_process(pid)
            resident = sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0)
            used += resident
            # VmHWM includes file pages; those mapped now were mapped at the peak, too.
            beyond = max(beyond, sizes.get("VmHWM", 0) - sizes.get("RssFile", 0) - resident)
        machine_used = self._host.used_bytes()
        self._most_used = max(self._most_used, machine_used)
        total = self._host.total_bytes
        look = self._with_peak(HOST_PLACE, used, total, total - machine_used)
        self._host_peak = max(self._host_peak, look.peak_bytes, used + beyond)
        return replace(look, peak_bytes=self._host_peak)

    def _with_peak(
        self,
        place: str,
        used: int,
        limit: int,
        free: int,
    ) -> Look:
        self._peaks[place] = max(used, self._peaks.get(place, 0))
        return Look(
            place=place,
            used_bytes=used,
            peak_bytes=self._peaks[place],
            limit_bytes=limit,
            free_bytes=max(0, free),
        )


def unseen_nodes(launch_text: str, environment: Mapping[str, str]) -> str:
    """Return what the guard does not see of a run on several nodes; empty for one node."""
    stated = NODE_SETTING.findall(launch_text)
    for name in NODE_VARIABLES:
        number = environment.get(name, "")
        stated.append(number)
    nodes = max((int(number) for number in stated if number.isdigit()), default=1)
    if nodes < 2:
        return ""
    return (
        f"this run has {nodes} nodes: memory is seen on this one only, and of the others what they"
        " print here"
    )

"""Device memory (NVML) during a probe, sampled in the parent process, apart from the training.

Used bytes are read every INTERVAL_SECONDS. The process list costs more and is read every
LIST_SECONDS; in between, the share of other processes is taken from the last list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from autotune.core.measurement import Phase
from autotune.machine.nvml import GpuLost, Nvml, NvmlNotSupported
from autotune.probe.process_meter import Meter

HIDDEN = "NVML gives no bytes per process here"
ELSEWHERE = "NVML reports process numbers from outside of this container"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Memory of a GPU at one moment."""

    used_bytes: int
    processes: Mapping[int, int | None] | None  # Bytes by pid; None where NVML does not list them
    why: str | None = None  # Reason why NVML does not


@dataclass(frozen=True, kw_only=True)
class Split:
    """A reading, attributed."""

    foreign_bytes: int  # Bytes of others or of no listed process: probe = used - foreign

    listed_bytes: int | None
    """Bytes of the probe's processes in NVML's list; None where the list is unusable."""

    others: Mapping[int, int]  # Bytes of listed other processes, by pid
    why: str | None  # Reason why the list is unusable; None where it is usable


def split(
    now: Reading,
    before: Reading,
    probe_pids: Collection[int],
    is_here: Callable[[int], bool],
    *,
    own_namespace: bool = False,
) -> Split:
    """Attribute `now` to the processes `ours`, which held nothing `before`: a number that did is
    another process's.

    `own_namespace`: this process is in a PID namespace of its own, as in containers. NVML's numbers
    may then be the host's, and equal ours by chance.

    With a usable process list: foreign = unlisted bytes before + sum of listed others. Otherwise:
    foreign = used before.
    """
    probe_pids = set(probe_pids) - set(before.processes or {})
    why = _unusable(now, before, probe_pids, is_here, own_namespace)
    if why is not None:
        return Split(
            foreign_bytes=before.used_bytes,
            listed_bytes=None,
            others={},
            why=why,
        )
    own_bytes = 0
    foreign = {}
    for pid, used in (now.processes or {}).items():
        if pid in probe_pids:
            own_bytes += used or 0
        else:
            foreign[pid] = used or 0
    listed_before = sum(used or 0 for used in (before.processes or {}).values())
    unlisted_bytes = max(0, before.used_bytes - listed_before)
    return Split(
        foreign_bytes=unlisted_bytes + sum(foreign.values()),
        listed_bytes=own_bytes,
        others=foreign,
        why=None,
    )


def newcomers(split_now: Split, before: Reading) -> dict[int, int]:
    """Return the growth of other processes since `before`, by pid."""
    earlier = before.processes or {}
    grown = {}
    for pid, used in split_now.others.items():
        growth = used - (earlier.get(pid) or 0)
        if growth > 0:
            grown[pid] = growth
    return grown


def _unusable(
    now: Reading,
    before: Reading,
    probe_pids: Collection[int],
    is_here: Callable[[int], bool],
    own_namespace: bool,
) -> str | None:
    if now.processes is None or before.processes is None:
        return now.why or before.why or HIDDEN
    if any(used is None for used in (*now.processes.values(), *before.processes.values())):
        return HIDDEN
    if own_namespace and not all(is_here(pid) for pid in now.processes):
        return ELSEWHERE  # a driver that translated the numbers would list visible processes only
    if any(pid in probe_pids for pid in now.processes):
        return None
    for pid in now.processes:
        if pid not in before.processes and not is_here(pid):
            return ELSEWHERE
    return None


DEVICE_SAMPLE_SECONDS = 0.02
LIST_SECONDS = 0.25
INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # Constant of the kernel: PROC_PID_INIT_INO
_T = TypeVar("_T")


def read(nvml: Nvml, uuid: str) -> Reading:
    """Read a GPU now; without its processes where NVML does not list them."""
    used = nvml.used_bytes(uuid)
    try:
        processes = nvml.processes(uuid)
    except NvmlNotSupported as reason:
        return Reading(
            used_bytes=used,
            processes=None,
            why=str(reason),
        )
    return Reading(used_bytes=used, processes=processes)


def is_here(pid: int) -> bool:
    """Return True if the pid is a process of our own namespace."""
    return Path("/proc", str(pid)).exists()


@dataclass(kw_only=True)
class DevicePeaks:
    """Figures of one GPU since `mark`."""

    before: Reading  # Reading without any process of the probe
    foreign_bytes: int  # Used bytes that are not the probe's, by the last list
    peak_bytes: int = 0
    phase_peak_bytes: dict[str, int] = field(default_factory=dict)

    listed_peak_bytes: int | None = None
    """Peak of the probe's processes by the list; None until one of them is in it."""

    newcomers: dict[int, int] = field(default_factory=dict)
    """Peak growth of other processes, by pid."""

    why: str | None = None
    """Reason why the list is unusable; None where it attributes the memory."""

    unattributed: dict[Phase | None, int] = field(default_factory=dict)
    """Highest used bytes since the last list, by phase: others may have taken a part since then."""

    def take(self, used_bytes: int, phase: Phase | None) -> int:
        """Record a sample and return the probe's own bytes in it, by the latest list of
        processes.
        """
        self.unattributed[phase] = max(used_bytes, self.unattributed.get(phase, 0))
        return max(0, used_bytes - self.foreign_bytes)

    def list(
        self,
        now: Reading,
        probe_pids: Collection[int],
        is_visible: Callable[[int], bool],
        own_namespace: bool = False,
    ) -> None:
        """Attribute the memory by the process list: the samples since the last one, and this
        one. Where the others' part changed in between, samples count with the larger one: growth
        of others is never the probe's. What the probe held beyond is in its own processes'
        bytes.
        """
        attributed = split(now, self.before, probe_pids, is_visible, own_namespace=own_namespace)
        self._attribute(max(self.foreign_bytes, attributed.foreign_bytes))
        self.foreign_bytes = attributed.foreign_bytes
        self.why = attributed.why
        if attributed.listed_bytes:
            self.listed_peak_bytes = max(attributed.listed_bytes, self.listed_peak_bytes or 0)
        for pid, growth in newcomers(attributed, self.before).items():
            self.newcomers[pid] = max(growth, self.newcomers.get(pid, 0))

    def attribute(self, phase: Phase | None, used_bytes: int) -> int:
        """Record a sample at the moment of the last list, and return the probe's own bytes in
        it.
        """
        probe_bytes = self.take(used_bytes, phase)
        self._attribute(self.foreign_bytes)
        return probe_bytes

    def _attribute(self, foreign_bytes: int) -> None:
        for phase, used in self.unattributed.items():
            probe_bytes = max(0, used - foreign_bytes)
            self.peak_bytes = max(self.peak_bytes, probe_bytes)
            if phase is not None:
                self.phase_peak_bytes[phase] = max(probe_bytes, self.phase_peak_bytes.get(phase, 0))
        self.unattributed.clear()


class DeviceMeter(Meter):
    """Sampling thread with the peaks since `mark`, in total and by phase, and the timeline of
    the fullest GPU.
    """

    def __init__(
        self,
        nvml: Nvml,
        uuids: Sequence[str],
        before: Mapping[str, Reading],
        probe_pids: Callable[[], Collection[int]],
        *,
        is_visible: Callable[[int], bool] = is_here,
        interval_seconds: float = DEVICE_SAMPLE_SECONDS,
        list_seconds: float = LIST_SECONDS,
    ) -> None:
        super().__init__("autotune-device-meter", interval_seconds)
        self._nvml = nvml
        self._uuids = tuple(uuids)
        self._before = before
        self._own_processes = probe_pids
        self._is_visible = is_visible
        self._list_seconds = list_seconds
        try:  # a PID namespace other than the first one, as in most containers
            self._own_namespace = Path("/proc/self/ns/pid").readlink().name != INITIAL_PID_NAMESPACE
        except OSError:
            self._own_namespace = True

        self.lost: str | None = None
        """First GPU that stopped answering, with the error; None while all do."""

        self._peaks: dict[str, DevicePeaks] = {}
        self.mark()
        self._thread.start()

    def mark(self) -> None:
        with self._lock:
            self._phase = None
            self._timeline.begin()
            self._peaks = {}
            for uuid in self._uuids:
                before = self._before[uuid]
                self._peaks[uuid] = DevicePeaks(before=before, foreign_bytes=before.used_bytes)

    def look(self) -> None:
        """Take a full sample now, with the process list."""
        own_processes = self._own_processes()
        for uuid in self._uuids:
            now = self._query(read, uuid)
            if now is None:
                continue
            with self._lock:
                peaks = self._peaks[uuid]
                peaks.list(now, own_processes, self._is_visible, self._own_namespace)
                own_bytes = peaks.attribute(self._phase, now.used_bytes)
                self._timeline.take(own_bytes, self._phase)

    def peaks(self) -> dict[str, DevicePeaks]:
        """Peaks by UUID."""
        with self._lock:
            return dict(self._peaks)

    def _run(self) -> None:
        listed_at = float("-inf")
        while not self._stop.wait(self._interval_seconds) and self.lost is None:
            if time.monotonic() - listed_at >= self._list_seconds:
                self.look()
                listed_at = time.monotonic()
            else:
                self._sample()

    def _sample(self) -> None:
        for uuid in self._uuids:
            used = self._query(lambda nvml, name: nvml.used_bytes(name), uuid)
            if used is not None:
                with self._lock:
                    own_bytes = self._peaks[uuid].take(used, self._phase)
                    self._timeline.take(own_bytes, self._phase)

    def _query(self, query: Callable[[Nvml, str], _T], uuid: str) -> _T | None:
        """Return None where NVML gives no figure this time; records a lost GPU."""
        try:
            return query(self._nvml, uuid)
        except NvmlNotSupported:
            return None
        except GpuLost as error:
            self.lost = f"GPU {uuid}: {error}"
            return None

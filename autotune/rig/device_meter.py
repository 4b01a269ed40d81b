"""The memory of GPUs while a probe runs, sampled in this process: nothing of it runs beside the training.

The device's used bytes are read often. Who holds them is listed now and then, which takes longer; in between, what others hold
is taken as it was in the last list.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from autotune.measurement import Moment, Phase
from autotune.nvml import CardLost, NotTold, Nvml
from autotune.rig.occupancy import Reading, newcomers, split
from autotune.rig.timeline import Timeline

INTERVAL_SECONDS = 0.02
LIST_SECONDS = 0.25

_T = TypeVar("_T")


def read(nvml: Nvml, uuid: str) -> Reading:
    """Now. A card that does not list its processes is read without them."""
    used = nvml.memory(uuid).used_bytes
    try:
        listed = {process.pid: process.used_bytes for process in nvml.processes(uuid)}
    except NotTold as reason:
        return Reading(used_bytes=used, processes=None, why=str(reason))
    return Reading(used_bytes=used, processes=listed)


def is_here(pid: int) -> bool:
    """Whether this number means a process in our own namespace."""
    return Path("/proc", str(pid)).exists()


@dataclass(kw_only=True)
class DevicePeaks:
    """One GPU since `mark`."""

    before: Reading
    """When nothing of the probe was on it."""

    foreign_bytes: int
    """What of its used bytes is not the probe's, by the last list."""

    peak_bytes: int = 0
    phase_peak_bytes: dict[str, int] = field(default_factory=dict)
    listed_peak_bytes: int | None = None
    """What its processes were given in the list at most; None until one of them was in it."""

    newcomers: dict[int, int] = field(default_factory=dict)
    """By process: the most that others took of it beyond what they had before."""

    why: str | None = None
    """Why the list does not tell whose memory it is; None where it does."""

    def take(self, used_bytes: int, phase: Phase | None) -> int:
        """What the probe holds of them."""
        own = max(0, used_bytes - self.foreign_bytes)
        self.peak_bytes = max(self.peak_bytes, own)
        if phase is not None:
            self.phase_peak_bytes[phase] = max(own, self.phase_peak_bytes.get(phase, 0))
        return own

    def list(self, now: Reading, ours: Collection[int], here: Callable[[int], bool]) -> None:
        """Look at who holds what: corrects what is taken for the probe's from here on."""
        found = split(now, self.before, ours, here)
        self.foreign_bytes, self.why = found.foreign_bytes, found.why
        if found.listed_bytes:
            self.listed_peak_bytes = max(found.listed_bytes, self.listed_peak_bytes or 0)
        for pid, growth in newcomers(found, self.before).items():
            self.newcomers[pid] = max(growth, self.newcomers.get(pid, 0))


class DeviceMeter:
    """Samples until it is closed; keeps peaks since `mark`, and by phase as far as it is told."""

    def __init__(
        self,
        nvml: Nvml,
        uuids: Sequence[str],
        before: Mapping[str, Reading],
        ours: Callable[[], Collection[int]],
        *,
        here: Callable[[int], bool] = is_here,
        interval_seconds: float = INTERVAL_SECONDS,
        list_seconds: float = LIST_SECONDS,
    ) -> None:
        self._nvml, self._uuids, self._before, self._ours, self._here = nvml, tuple(uuids), before, ours, here
        self._interval, self._list_seconds = interval_seconds, list_seconds
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._phase: Phase | None = None
        self._timeline = Timeline()
        """Of the fullest of them at each moment."""
        self.lost: str | None = None
        """Which GPU stopped to answer, and how; None while all do."""
        self._peaks: dict[str, DevicePeaks] = {}
        self.mark()
        self._thread = threading.Thread(target=self._run, name="autotune-device-meter", daemon=True)
        self._thread.start()

    def mark(self) -> None:
        """A new command: peaks start again."""
        with self._lock:
            self._phase = None
            self._timeline.begin()
            self._peaks = {u: DevicePeaks(before=self._before[u], foreign_bytes=self._before[u].used_bytes) for u in self._uuids}

    def enter(self, phase: Phase | None) -> None:
        """What is sampled from here on belongs to this phase."""
        with self._lock:
            self._phase = phase

    def look(self) -> None:
        """One full sample now, processes listed."""
        ours = self._ours()
        for uuid in self._uuids:
            now = self._told(read, uuid)
            if now is not None:
                with self._lock:
                    self._peaks[uuid].list(now, ours, self._here)
                    self._take(uuid, now.used_bytes)

    def _take(self, uuid: str, used_bytes: int) -> None:
        self._timeline.take(self._peaks[uuid].take(used_bytes, self._phase), self._phase)

    def timeline(self) -> tuple[Moment, ...]:
        """Since `mark`."""
        with self._lock:
            return self._timeline.moments()

    def peaks(self) -> dict[str, DevicePeaks]:
        """By UUID."""
        with self._lock:
            return dict(self._peaks)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        listed = float("-inf")
        while not self._stop.wait(self._interval) and self.lost is None:
            if time.monotonic() - listed >= self._list_seconds:
                self.look()
                listed = time.monotonic()
            else:
                self._glance()

    def _glance(self) -> None:
        for uuid in self._uuids:
            used = self._told(_used_bytes, uuid)
            if used is not None:
                with self._lock:
                    self._take(uuid, used)

    def _told(self, ask: Callable[[Nvml, str], _T], uuid: str) -> _T | None:
        """None where it was not told this time; a GPU that is lost is remembered."""
        try:
            return ask(self._nvml, uuid)
        except NotTold:
            return None
        except CardLost as error:
            self.lost = f"GPU {uuid}: {error}"
            return None


def _used_bytes(nvml: Nvml, uuid: str) -> int:
    return nvml.memory(uuid).used_bytes

"""Memory of a process tree, sampled from the parent process.

A cgroup counts every page once. Without one: total = sum of RSS - correction, as pages that a
forked rank shares with its worker appear in both. correction = sum of RSS - sum of PSS takes a walk
through the page tables and is updated only now and then.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.core.measurement import MemorySample, Phase
from autotune.core.units import KIB
from autotune.worker.processes import descendants

MAX_INTERVALS = 48  # Beyond it, neighbouring intervals are merged and their width doubles
FIRST_INTERVAL_SECONDS = 0.1


class Timeline:
    """Peak of each interval, with the phase of that peak."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self._started = self._clock()
        self._width = FIRST_INTERVAL_SECONDS
        self._intervals: dict[int, tuple[int, Phase | None]] = {}

    def take(self, used_bytes: int, phase: Phase | None) -> None:
        while self._current_interval() >= MAX_INTERVALS:
            self._merge_neighbours()
        self._raise_to(self._current_interval(), used_bytes, phase)

    def moments(self) -> tuple[MemorySample, ...]:
        samples = []
        for number, (used, phase) in sorted(self._intervals.items()):
            seconds = round((number + 1) * self._width, 3)
            samples.append(
                MemorySample(
                    seconds=seconds,
                    peak_bytes=used,
                    phase=phase,
                )
            )
        return tuple(samples)

    def _current_interval(self) -> int:
        return int((self._clock() - self._started) / self._width)

    def _merge_neighbours(self) -> None:
        finer = self._intervals
        self._intervals = {}
        self._width *= 2
        for number, (used, phase) in finer.items():
            self._raise_to(number // 2, used, phase)

    def _raise_to(
        self,
        number: int,
        used_bytes: int,
        phase: Phase | None,
    ) -> None:
        peak = self._intervals.get(number)
        if peak is None or used_bytes >= peak[0]:
            self._intervals[number] = (used_bytes, phase)


def concatenated(
    first: Sequence[MemorySample],
    then: Sequence[MemorySample],
    later_seconds: float,
) -> tuple[MemorySample, ...]:
    """Join the timelines of two commands; the second began `later_seconds` after the first."""
    joined = list(first)
    for sample in then:
        joined.append(replace(sample, seconds=round(later_seconds + sample.seconds, 3)))
    return tuple(joined)


INTERVAL_SECONDS = 0.01
TREE_SECONDS = 0.1
SHARED_SECONDS = 0.5

# Pause after a walk in units of its duration: walks take at most 1/50 of the time, whatever the
# size.
WALK_PAUSE = 50


class TreeMemory:
    """Anonymous and shared memory of a process and its descendants, each page counted once."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._pids: list[int] = []
        self._shared_bytes = 0
        self._listed = self._next_walk = float("-inf")

    def read(self) -> int | None:
        now = time.monotonic()
        if now - self._listed > TREE_SECONDS:
            self._list(now)
        if now >= self._next_walk:
            return self.exact()
        return max(0, self._total() - self._shared_bytes)

    def exact(self) -> int:
        """Read with the process list and the correction updated now."""
        started = time.monotonic()
        self._list(started)
        total = self._total()
        proportional = self._sum("smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))
        self._shared_bytes = max(0, total - proportional)
        ended = time.monotonic()
        self._next_walk = ended + max(SHARED_SECONDS, WALK_PAUSE * (ended - started))
        return proportional

    def _list(self, now: float) -> None:
        pids = [self._root, *descendants(self._root)]
        if set(pids) - set(self._pids):
            self._next_walk = now  # a forked process shares all pages at first
        self._pids = pids
        self._listed = now

    def _total(self) -> int:
        return self._sum("status", ("RssAnon:", "RssShmem:"))

    def _sum(self, file: str, fields: tuple[str, ...]) -> int:
        total = 0
        for pid in self._pids:
            with contextlib.suppress(OSError):  # exited meanwhile
                for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
                    if line.startswith(fields):
                        total += int(line.split()[1]) * KIB
        return total


class Meter:
    """Sampling thread with a timeline. Subclasses sample in `_run`, and start the thread once
    all of their fields are set.
    """

    def __init__(self, name: str, interval_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._phase: Phase | None = None
        self._timeline = Timeline()
        self._thread = threading.Thread(
            target=self._run,
            name=name,
            daemon=True,
        )

    def enter(self, phase: Phase | None) -> None:
        """Attribute the following samples to this phase."""
        with self._lock:
            self._phase = phase

    def timeline(self) -> tuple[MemorySample, ...]:
        """Timeline since `mark`."""
        with self._lock:
            return self._timeline.moments()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        raise NotImplementedError


class ProcessMeter(Meter):
    """Sampling thread with the peaks since `mark`, in total and by phase. `over` is called for a
    sample beyond the limit and returns True if it killed a process.
    """

    def __init__(
        self,
        read: Callable[[], int | None],
        *,
        exact: Callable[[], int | None] | None = None,
        limit_bytes: int | None = None,
        over: Callable[[], bool] | None = None,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        super().__init__("autotune-meter", interval_seconds)
        self._read = read
        self._exact = exact or read
        self._limit_bytes = limit_bytes
        self._over = over
        self._peak = 0
        self._by_phase: dict[str, int] = {}
        self.went_over = False  # True if the limit was enforced since `mark`
        self._thread.start()

    def now(self) -> int:
        """Return the tree's memory now, by the exact method."""
        return self._sample(self._exact)

    def mark(self) -> None:
        """Reset the peaks for a new command."""
        with self._lock:
            self._peak = 0
            self._by_phase = {}
            self._phase = None
            self.went_over = False
            self._timeline.begin()

    @property
    def peak_bytes(self) -> int:
        with self._lock:
            return self._peak

    @property
    def phase_peak_bytes(self) -> dict[str, int]:
        with self._lock:
            return dict(self._by_phase)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            used = self._sample(self._read)
            if self._over is None or self._limit_bytes is None:
                continue
            if used > self._limit_bytes:
                self.went_over = self._over() or self.went_over

    def _sample(self, read: Callable[[], int | None]) -> int:
        try:
            used = read() or 0
        except (OSError, KeyError, ValueError):  # the tree or its cgroup is being removed
            return 0
        with self._lock:
            self._peak = max(self._peak, used)
            self._timeline.take(used, self._phase)
            if self._phase is not None:
                self._by_phase[self._phase] = max(used, self._by_phase.get(self._phase, 0))
        return used

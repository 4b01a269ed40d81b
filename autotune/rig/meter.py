"""The memory of a process tree, sampled from outside, so that the measuring does not run in what is measured.

A cgroup counts every page once. Without one, the processes' own figures are added up; pages that a
rank still shares with the keeper it was forked from appear in both, so their share is looked up now
and then (it takes a walk through the page tables) and taken off.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from autotune.inside.processes import descendants
from autotune.measurement import Moment, Phase
from autotune.rig.timeline import Timeline

INTERVAL_SECONDS = 0.01
TREE_SECONDS = 0.1
SHARED_SECONDS = 0.5
SHARED_SHARE = 50
"""The walk takes one part in so many of the time, however large the processes are."""


class TreeMemory:
    """Anonymous and shared memory of a process and all below it, each page counted once."""

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
        """The same with processes and shares looked up now."""
        started = time.monotonic()
        self._list(started)
        total, proportional = self._total(), sum(_proportional_bytes(pid) for pid in self._pids)
        self._shared_bytes = max(0, total - proportional)
        ended = time.monotonic()
        self._next_walk = ended + max(SHARED_SECONDS, SHARED_SHARE * (ended - started))
        return proportional

    def _list(self, now: float) -> None:
        pids = [self._root, *descendants(self._root)]
        if set(pids) - set(self._pids):
            self._next_walk = now  # what was forked shares everything at first
        self._pids, self._listed = pids, now

    def _total(self) -> int:
        return sum(_resident_bytes(pid) for pid in self._pids)


def _resident_bytes(pid: int) -> int:
    return _sum_of(Path(f"/proc/{pid}/status"), ("RssAnon:", "RssShmem:"))


def _proportional_bytes(pid: int) -> int:
    return _sum_of(Path(f"/proc/{pid}/smaps_rollup"), ("Pss_Anon:", "Pss_Shmem:"))


def _sum_of(file: Path, fields: tuple[str, ...]) -> int:
    with contextlib.suppress(OSError):
        return sum(int(line.split()[1]) * 1024 for line in file.read_text().splitlines() if line.startswith(fields))
    return 0  # it has ended meanwhile


class Meter:
    """Samples until it is closed; keeps the peak since `mark`, and by phase as far as it is told.

    `over` is called when a sample is beyond the limit, and says whether it did something about it.
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
        self._read, self._exact, self._limit_bytes, self._over = read, exact or read, limit_bytes, over
        self._interval_seconds = interval_seconds
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._phase: Phase | None = None
        self._timeline = Timeline()
        self._peak = 0
        self._by_phase: dict[str, int] = {}
        self.went_over = False
        """Whether the limit was crossed since `mark`."""
        self._thread = threading.Thread(target=self._run, name="autotune-meter", daemon=True)
        self._thread.start()

    def now(self) -> int:
        """The tree's memory at this moment, as exactly as it can be had."""
        return self._sample(self._exact)

    def mark(self) -> None:
        """A new candidate: peaks start again."""
        with self._lock:
            self._peak, self._by_phase, self._phase, self.went_over = 0, {}, None, False
            self._timeline.begin()

    def enter(self, phase: Phase | None) -> None:
        """What is sampled from here on belongs to this phase."""
        with self._lock:
            self._phase = phase

    @property
    def peak_bytes(self) -> int:
        with self._lock:
            return self._peak

    @property
    def phase_peak_bytes(self) -> dict[str, int]:
        with self._lock:
            return dict(self._by_phase)

    def timeline(self) -> tuple[Moment, ...]:
        """Since `mark`."""
        with self._lock:
            return self._timeline.moments()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            used = self._sample(self._read)
            if self._over is not None and self._limit_bytes is not None and used > self._limit_bytes:
                self.went_over = self._over() or self.went_over

    def _sample(self, read: Callable[[], int | None]) -> int:
        try:
            used = read() or 0
        except (OSError, KeyError, ValueError):  # the tree, or its cgroup, is just going
            return 0
        with self._lock:
            self._peak = max(self._peak, used)
            self._timeline.take(used, self._phase)
            if self._phase is not None:
                self._by_phase[self._phase] = max(used, self._by_phase.get(self._phase, 0))
        return used

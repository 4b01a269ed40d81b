"""Where a probe is and what that costs: exclusive seconds and peak memory for each phase.

One phase at a time owns the clock; a phase entered inside another takes it over and gives it back.
Whatever belongs to none of the eight is `other`, so the seconds always sum to the wall's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .memory import Meter, cpu_meter
from .trend import Trend

PHASES = ("load", "rollout", "sync", "reward", "score", "forward", "backward", "optimizer")
OTHER = "other"

TOLD_EVERY_SECONDS = 0.5
"""Between two words about how far it is: far more often than anybody asks, far less often than tokens are written."""

Emit = Callable[[dict[str, Any]], None]


class Stage:
    """What one rank reports about itself while it loads and measures."""

    def __init__(
        self,
        *,
        emit: Emit,
        rank: int = 0,
        world_size: int = 1,
        limit_bytes: int | None = None,
        device: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        meter: Meter | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.limit_bytes = limit_bytes
        # What is known of this rank's GPU: others_bytes, cap_bytes, engine_share_scale. Empty without one.
        self.device: Mapping[str, Any] = device or {}
        self.emit = emit
        # Adapters set it to wait for the device, so that work is timed where it was asked for.
        self.settle: Callable[[], None] = lambda: None
        self._clock = clock
        self._meter = meter or cpu_meter()
        self._trend = Trend(limit_bytes, lambda: self._meter.now())
        self.begin()

    def begin(self) -> None:
        """A new request: clocks and peaks start from nothing."""
        self._stack = [OTHER]
        self.stay = 0  # how many times the phase changed: tells one stay in a phase from the next
        self._seconds = dict.fromkeys((*PHASES, OTHER), 0.0)
        self._peaks: dict[str, int] = {}
        self._torch: dict[str, dict[str, Any]] = {}
        self._cycle_peak = 0
        self._meter.take_peak()
        self._since = self._told = self._clock()

    @property
    def phase(self) -> str | None:
        """The phase that runs, or that an exception left; None outside the eight."""
        phase = self._stack[-1]
        return None if phase == OTHER else phase

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Run in `phase`. An exception leaves the phase standing, so that who catches it can read where it came from."""
        depth = len(self._stack)
        self.enter(phase)
        yield
        self._leave_to(depth)

    def enter(self, phase: str) -> None:
        """Take the clock over; `leave` gives it back. For work that begins and ends in different places."""
        if phase not in PHASES:
            raise ValueError(f"{phase!r} is not one of the phases {', '.join(PHASES)}")
        self._turn()
        self._stack.append(phase)
        self._announce()

    def leave(self) -> None:
        """End the phase that was entered last."""
        self._leave_to(max(1, len(self._stack) - 1))

    def _leave_to(self, depth: int) -> None:
        if len(self._stack) <= depth:
            return
        self._turn()
        del self._stack[depth:]
        self._announce()

    def _announce(self) -> None:
        self.stay += 1
        self._trend.begin()
        if self.phase is not None:
            self.emit({"event": "phase", "phase": self.phase})

    def _turn(self) -> None:
        """Book the time and the peak since the last turn to the phase that ends."""
        self.settle()
        now = self._clock()
        self._seconds[self._stack[-1]] += now - self._since
        self._since = now
        torch = self._meter.take_torch()
        if torch is not None:
            self._torch[self._stack[-1]] = _together(torch, self._torch.get(self._stack[-1]))
        peak = self._meter.take_peak()
        self._peaks[self._stack[-1]] = max(peak, self._peaks.get(self._stack[-1], 0))
        self._cycle_peak = max(peak, self._cycle_peak)

    def use_meter(self, meter: Meter) -> None:
        """Measure another memory from here on: the GPU's, once there is one."""
        self._meter.close()
        self._meter = meter
        self._meter.take_peak()

    def seconds(self) -> dict[str, float]:
        """Seconds of every phase since `begin`, and of `other`."""
        self._turn()
        return dict(self._seconds)

    def memory(self) -> dict[str, Any]:
        """Peaks since `begin`: over all, by phase, and torch's own."""
        self._turn()
        by_phase = {phase: peak for phase, peak in self._peaks.items() if phase != OTHER}
        torch = {phase: figures for phase, figures in self._torch.items() if phase != OTHER}
        return {
            "peak_bytes": max(self._peaks.values()),
            "phase_peak_bytes": by_phase,
            "torch_by_phase": torch,
            **self._meter.totals(),
        }

    def take_cycle(self) -> dict[str, int]:
        """The most that was held since the last call, and what is held now."""
        self._turn()
        peak, self._cycle_peak = self._cycle_peak, 0
        return {"peak_bytes": peak, "held_bytes": self._meter.now()}

    def progress(self, done: int, total: int, what: str = "step") -> None:
        """`done` of a known `total` in this phase; raises LimitForeseen when memory must cross the limit."""
        self._trend.progress(done, total, what)
        self.moves(f"{what} {done} of {total}")

    def moves(self, words: str) -> None:
        """Say now and then that it goes on: at a deadline, slow is then told from hung."""
        now = self._clock()
        if now - self._told >= TOLD_EVERY_SECONDS:
            self._told = now
            self.emit({"event": "moves", "words": words})

    def close(self) -> None:
        self._meter.close()


def _together(one: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any]:
    """Two stays in one phase: the higher peaks, the counts added up."""
    if other is None:
        return one
    peaks = {
        name: None if one[name] is None or other[name] is None else max(one[name], other[name])
        for name in ("allocated_bytes", "reserved_bytes")
    }
    return {**peaks, **{name: one[name] + other[name] for name in ("retries", "out_of_memory")}}

"""Phases of a probe and their cost: exclusive seconds and peak memory of each; and reasons to end a
probe early.

One phase at a time owns the clock; a phase entered inside another takes it over and returns it.
Time in none of the eight phases is `other`, so the seconds always sum to the wall time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from . import protocol
from .process_memory import MemoryMeter, cpu_meter
from .protocol import OTHER_PHASE, PHASES, Request, Result

# Upper bound of a candidate's speed: this many standard errors above the fastest cycle.
MARGIN_STANDARD_ERRORS = 2.0
SINGLE_CYCLE_FACTOR = 2.0  # slowdown by a disturbance that a single cycle may have
# Interval of progress messages: shorter than the parent's need, longer than the time for a token.
PROGRESS_INTERVAL_S = 0.5
MIN_DONE_SHARE = 0.25  # share of the work before the first extrapolation
MAX_READINGS = 32  # memory readings over one stretch of work
RECENT_READINGS = 3  # number of recent readings whose slopes are compared; the smallest counts


class LimitForeseen(MemoryError):
    """Memory will cross the limit before the current work is done."""


class Trend:
    """Extrapolation over one stretch of known work at a time (tokens to generate, layers to run).

    Where memory grows with the work, a quarter of it is enough to extrapolate. The slowest recent
    growth is assumed to continue; freed or reused memory makes the estimate smaller, never larger.
    """

    def __init__(self, limit_bytes: int | None, read_bytes: Callable[[], int]) -> None:
        self._limit_bytes = limit_bytes
        self._read_bytes = read_bytes
        self.begin()

    def begin(self) -> None:
        """Start a new stretch of work, without the earlier readings."""
        self._readings: list[_Reading] = []
        self._next_reading = 0

    def progress(
        self,
        done: int,
        total: int,
        unit: str,
    ) -> None:
        """Record `done` of `total`. Raise LimitForeseen if the rest cannot fit."""
        limit = self._limit_bytes
        if limit is None or done < self._next_reading or done >= total:
            return
        self._next_reading = done + max(1, total // MAX_READINGS)
        now = _Reading(done, self._read_bytes())
        self._readings.append(now)
        text = f"at {unit} {done} of {total} memory is {now.bytes} bytes"
        if now.bytes > limit:
            raise LimitForeseen(f"{text}, over the limit of {limit} bytes")
        is_done_share_small = done < total * MIN_DONE_SHARE
        if is_done_share_small or len(self._readings) <= RECENT_READINGS:
            return
        slope = self._slowest_growth(now)
        remaining_bytes = int(slope * (total - done))
        bytes_at_end = now.bytes + remaining_bytes
        if slope > 0 and bytes_at_end > limit:
            raise LimitForeseen(
                f"{text} and grows by {int(slope)} bytes a {unit}: it reaches {bytes_at_end} bytes,"
                f" over the limit of {limit} bytes"
            )

    def _slowest_growth(self, now: _Reading) -> float:
        """Return the smallest growth in bytes per unit of work.

        It is that since recent readings and since one halfway back: growth comes in steps (pages,
        arenas).
        """
        halfway = self._readings[len(self._readings) // 2 - 1]
        recent = self._readings[-1 - RECENT_READINGS : -1]
        slopes = []
        for before in (*recent, halfway):
            added_bytes = now.bytes - before.bytes
            slopes.append(added_bytes / (now.done - before.done))
        return min(slopes)


class _Reading(NamedTuple):
    done: int  # units of work
    bytes: int


class PhaseRecorder:
    """Phases, seconds and memory of one rank while it loads and measures."""

    def __init__(
        self,
        *,
        emit: Callable[[Result], None],
        rank: int = 0,
        world_size: int = 1,
        local_rank: int | None = None,
        limit_bytes: int | None = None,
        device: Request | None = None,
        clock: Callable[[], float] = time.perf_counter,
        meter: MemoryMeter | None = None,
    ) -> None:
        self.emit = emit
        self.rank = rank
        self.world_size = world_size
        self.limit_bytes = limit_bytes
        # Number of this rank's GPU among those of its machine.
        self.local_rank = rank if local_rank is None else local_rank
        # Facts about this rank's GPU: others_bytes, cap_bytes, engine_share_scale. Empty without
        # one.
        self.device: Request = device or {}
        # Adapters replace it by a wait for the device, so that work is timed in the phase that
        # started it.
        self.synchronize: Callable[[], None] = lambda: None
        self._clock = clock
        self._meter = meter or cpu_meter()
        self._trend = Trend(limit_bytes, lambda: self._meter.now())
        self.begin()

    def begin(self) -> None:
        """Reset clocks and peaks for a new request."""
        self._stack = [OTHER_PHASE]
        self.phase_changes = 0
        self._seconds = dict.fromkeys((*PHASES, OTHER_PHASE), 0.0)
        self._peaks: dict[str, int] = {}
        self._torch: dict[str, Result] = {}
        self._cycle_peak = 0
        self._meter.take_peak()
        self._since = self._reported = self._clock()

    @property
    def phase(self) -> str | None:
        """Current phase, or the one that an exception left; None outside the eight."""
        phase = self._stack[-1]
        return None if phase == OTHER_PHASE else phase

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Run in `phase`. An exception leaves the phase in place for its handler."""
        depth = len(self._stack)
        self.enter(phase)
        yield
        self._leave_to(depth)

    def enter(self, phase: str) -> None:
        """Start a phase that `leave` ends, possibly in another function."""
        if phase not in PHASES:
            raise ValueError(f"{phase!r} is not one of the phases {', '.join(PHASES)}")
        self._account()
        self._stack.append(phase)
        self._announce()

    def leave(self) -> None:
        """End the phase that was entered last."""
        depth = max(1, len(self._stack) - 1)
        self._leave_to(depth)

    def _leave_to(self, depth: int) -> None:
        if len(self._stack) > depth:
            self._account()
            del self._stack[depth:]
            self._announce()

    def _announce(self) -> None:
        self.phase_changes += 1
        self._trend.begin()
        if self.phase is not None:
            self.emit({"event": protocol.PHASE, "phase": self.phase})

    def _account(self) -> None:
        """Add the time and the peak since the last call to the phase that ends now."""
        self.synchronize()
        now = self._clock()
        phase = self._stack[-1]
        self._seconds[phase] += now - self._since
        self._since = now
        torch = self._meter.take_torch()
        if torch is not None:
            recorded = self._torch.get(phase)
            self._torch[phase] = _merged(torch, recorded)
        peak = self._meter.take_peak()
        highest = self._peaks.get(phase, 0)
        self._peaks[phase] = max(peak, highest)
        self._cycle_peak = max(peak, self._cycle_peak)

    def use_meter(self, meter: MemoryMeter) -> None:
        """Measure another memory from here on: that of the GPU, once it is known."""
        self._meter.close()
        self._meter = meter
        self._meter.take_peak()

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, and of `other`, since `begin`."""
        self._account()
        return dict(self._seconds)

    def memory(self) -> Result:
        """Peaks since `begin`, as the parent reads them."""
        self._account()
        phase_peaks = dict(self._peaks)
        phase_torch = dict(self._torch)
        for by_phase in (phase_peaks, phase_torch):
            by_phase.pop(OTHER_PHASE, None)
        return {
            "peak_bytes": max(self._peaks.values()),
            "phase_peak_bytes": phase_peaks,
            "torch_by_phase": phase_torch,
            **self._meter.totals(),
        }

    def take_cycle(self) -> dict[str, int]:
        """Return the peak since the last call, and the current value."""
        self._account()
        peak, self._cycle_peak = self._cycle_peak, 0
        return {"peak_bytes": peak, "held_bytes": self._meter.now()}

    def progress(
        self,
        done: int,
        total: int,
        unit: str = "step",
    ) -> None:
        """Record `done` of `total` in this phase. Raise LimitForeseen if memory cannot suffice."""
        self._trend.progress(done, total, unit)
        self.report_progress(f"{unit} {done} of {total}")

    def report_progress(self, text: str) -> None:
        """Send a progress message now and then: it separates slow from hung at a deadline."""
        now = self._clock()
        if now - self._reported >= PROGRESS_INTERVAL_S:
            self._reported = now
            self.emit({"event": protocol.PROGRESS, "words": text})

    def close(self) -> None:
        self._meter.close()


def _merged(stay: Result, before: Result | None) -> Result:
    """Combine torch's figures of two stays in a phase: maxima of peaks, sums of counts."""
    if before is None:
        return stay
    merged: Result = {}
    for name in ("allocated_bytes", "reserved_bytes"):
        peaks = stay[name], before[name]
        merged[name] = None if None in peaks else max(peaks)
    for name in ("retries", "out_of_memory"):
        merged[name] = stay[name] + before[name]
    return merged


def out_of_reach(
    rates: Sequence[float],
    *,
    goal: float,
    spread: float,
) -> bool:
    """Return True if the upper bound of these cycles' tokens per second is below the goal.

    r: rate of a cycle in tokens per second; n: number of cycles
    s: standard deviation of log r, at least `spread`, the usual one on this machine

    upper bound of log r = max(log r) + z s / sqrt(n)
    """
    if not rates or min(rates) <= 0 or goal <= 0:
        return False
    if len(rates) == 1:
        return rates[0] * SINGLE_CYCLE_FACTOR < goal
    logs = [math.log(rate) for rate in rates]
    count = len(logs)
    mean = sum(logs) / count
    variance = sum((value - mean) ** 2 for value in logs) / (count - 1)
    deviation = max(spread, math.sqrt(variance))
    upper_bound = max(logs) + MARGIN_STANDARD_ERRORS * deviation / math.sqrt(count)
    return upper_bound < math.log(goal)

"""Bars of a prediction's memory by phase and by part, on one scale with the limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.core.prediction import PhasePrediction, Prediction
from autotune.core.units import format_bytes
from autotune.report.job_text import print_line

if TYPE_CHECKING:
    from autotune.report.text_console import TextConsole

WIDEST_BAR = 56
LABEL = 14
FIGURE = 10

# Bar characters: in use, kept in torch's cache, upper end of the interval, limit.
LIVE = "█"
KEPT = "▒"
UNSURE = "░"
LIMIT = "│"
LOGITS = "logits"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Row of the bars: its size, the part of it in use, and the upper end of its interval."""

    label: str
    live: float
    size: float
    high: float
    figures: tuple[str, ...]


def show_memory(console: TextConsole, prediction: Prediction) -> None:
    """Print phases and parts as bars."""
    phases = [_phase_bar(phase) for phase in prediction.phases]
    parts = _part_bars(prediction.breakdown)
    limit = prediction.deciding_limit.value
    picture = _Picture(console, [*phases, *parts], limit)

    heading = (
        f"memory by phase: {LIVE} in use, {KEPT} kept in torch's cache, {UNSURE} possibly more"
    )
    print_line(console, heading)
    if phases:
        picture.print_columns("in use", "peak")
    picture.print_bars(phases)

    peak = prediction.peak_phase
    place = f" ({peak.name})" if peak else ""
    print_line(console, f"memory by part, at the peak{place}")
    picture.print_bars(parts)
    logits = _logits_elsewhere(prediction)
    if logits is not None:
        print_line(console, f"  {logits}")
    console.print()


def _phase_bar(phase: PhasePrediction) -> Bar:
    peak = phase.peak_bytes
    live: float = peak.value
    live_text = ""
    if phase.live_bytes is not None:
        live = phase.live_bytes
        live_text = format_bytes(live)
    return Bar(
        label=phase.name,
        live=live,
        size=peak.value,
        high=peak.high,
        figures=(live_text, format_bytes(peak.value)),
    )


def _part_bars(breakdown: Mapping[str, int]) -> list[Bar]:
    bars = []
    for name in sorted(breakdown, key=breakdown.__getitem__, reverse=True):
        size = breakdown[name]
        if not size:
            continue
        live = size
        if name == "fragmentation":
            live = 0
        bar = Bar(
            label=name.replace("_", " "),
            live=live,
            size=size,
            high=size,
            figures=("", format_bytes(size)),
        )
        bars.append(bar)
    return bars


def _logits_elsewhere(prediction: Prediction) -> str | None:
    """Return where the logits are largest, if they are not in memory at the peak."""
    if not prediction.breakdown or prediction.breakdown.get(LOGITS):
        return None
    largest = 0
    place = ""
    for phase in prediction.phases:
        size = phase.parts.get(LOGITS, 0)
        if size > largest:
            largest = size
            place = phase.name
    if not largest:
        return "logits: none at the peak of any phase"
    return f"logits: none at this peak, {format_bytes(largest)} at that of {place}"


class _Picture:
    """Bars of one width and scale."""

    def __init__(
        self,
        console: TextConsole,
        bars: list[Bar],
        limit: float,
    ) -> None:
        self._console = console
        self._top = limit
        self._label = LABEL
        for bar in bars:
            self._top = max(self._top, bar.high)
            self._label = max(self._label, len(bar.label) + 1)
        width = console.width - self._label - 2 * FIGURE - 5
        self._width = max(10, min(WIDEST_BAR, width))
        self._limit = self._columns(limit)

    def print_columns(self, *names: str) -> None:
        """Print the names above the figures."""
        self._print("", " " * (self._width + 1), names)

    def print_bars(self, bars: list[Bar]) -> None:
        for bar in bars:
            live = self._columns(bar.live)
            size = self._columns(bar.size)
            high = self._columns(bar.high)
            drawn = LIVE * live
            drawn += KEPT * (size - live)
            drawn += UNSURE * (high - size)
            cells = list(drawn.ljust(self._width + 1))
            cells[min(self._limit, self._width)] = LIMIT
            self._print(bar.label, "".join(cells), bar.figures)

    def _columns(self, size: float) -> int:
        return round(size / self._top * self._width)

    def _print(
        self,
        label: str,
        drawn: str,
        figures: tuple[str, ...],
    ) -> None:
        line = f"  {label:<{self._label}}{drawn}"
        for figure in figures:
            line += f" {figure:>{FIGURE}}"
        self._console.print(line, soft_wrap=True)

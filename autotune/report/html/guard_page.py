"""Page of a guarded run: its memory over time, with marks at checkpoints and restarts. It is drawn
without a script, from guard.json alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.space import setting_text
from autotune.core.units import counted, format_bytes, format_seconds
from autotune.report.html.templates import joined_files, open_templates

GUARD_CHART_WIDTH = 900
GUARD_CHART_HEIGHT = 240
HEADROOM = 1.1  # of the limit, above which nothing is drawn


@dataclass(frozen=True, kw_only=True)
class CheckpointMark:
    """Checkpoint in the chart."""

    x: float
    step: int


@dataclass(frozen=True, kw_only=True)
class AttemptLine:
    """Memory of one attempt, in the units of the chart."""

    points: str
    end: float
    title: str
    checkpoints: tuple[CheckpointMark, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryChart:
    lines: tuple[AttemptLine, ...]
    limit_y: float
    limit: str
    place: str
    duration: str
    summary: str  # for readers that do not see the chart
    width: int = GUARD_CHART_WIDTH
    height: int = GUARD_CHART_HEIGHT


@dataclass(frozen=True, kw_only=True)
class ChartScale:
    """From seconds and bytes to the chart."""

    began: float
    seconds: float
    top_bytes: float

    def x(self, seconds: float) -> float:
        return round(GUARD_CHART_WIDTH * (seconds - self.began) / self.seconds, 1)

    def y(self, size: float) -> float:
        return round(GUARD_CHART_HEIGHT * (1 - min(size, self.top_bytes) / self.top_bytes), 1)


def render_guard(document: Mapping[str, Any]) -> str:
    """Return the page of guard.json."""
    pages = open_templates()
    pages.filters.update(size=format_bytes)
    return pages.get_template("guard.html.jinja").render(
        run=document,
        headline=guard_headline(document),
        chart=memory_chart(document),
        size=format_bytes,
        value=setting_text,
        style=joined_files("page.css", "guard.css"),
    )


def guard_headline(document: Mapping[str, Any]) -> str:
    parts = [f"Guarded run: {str(document['status']).replace('_', ' ')}"]
    if document["steps"] is not None:
        parts.append(f"{document['steps']} steps")
    parts.append(counted(document["restarts"], "restart"))
    if document["lost_seconds"]:
        parts.append(f"{format_seconds(document['lost_seconds'])} lost")
    return ", ".join(parts)


def memory_chart(document: Mapping[str, Any]) -> MemoryChart | None:
    """Return the memory of all attempts; None where none was seen."""
    attempts = []
    for attempt in document["attempts"]:
        if attempt["memory"] and attempt["seconds"]:
            attempts.append(attempt)
    limit = 0
    for attempt in attempts:
        limit = max(limit, attempt["limit_bytes"] or 0)
    if not limit:
        return None
    began = attempts[0]["began"]
    ended = attempts[-1]["began"] + attempts[-1]["seconds"]
    scale = ChartScale(
        began=began,
        seconds=max(1e-3, ended - began),
        top_bytes=HEADROOM * limit,
    )
    lines = []
    peak = 0
    for attempt in attempts:
        lines.append(_line(attempt, scale))
        peak = max(peak, attempt["peak_bytes"] or 0)
    place = str(attempts[-1]["place"])
    return MemoryChart(
        lines=tuple(lines),
        limit_y=scale.y(limit),
        limit=format_bytes(limit),
        place=place,
        duration=format_seconds(scale.seconds),
        summary=f"Memory of {place}: peak {format_bytes(peak)} of {format_bytes(limit)}",
    )


def _line(attempt: Mapping[str, Any], scale: ChartScale) -> AttemptLine:
    began = attempt["began"]
    points = []
    for sample in attempt["memory"]:
        x = scale.x(began + sample["seconds"])
        points.append(f"{x},{scale.y(sample['bytes'])}")
    marks = []
    for checkpoint in attempt["checkpoints"]:
        mark = CheckpointMark(x=scale.x(began + checkpoint["seconds"]), step=checkpoint["step"])
        marks.append(mark)
    reason = "running"
    if attempt["end"] is not None:
        reason = attempt["end"]["reason"]
    return AttemptLine(
        points=" ".join(points),
        end=scale.x(began + attempt["seconds"]),
        title=f"attempt {attempt['number']}: {reason}",
        checkpoints=tuple(marks),
    )

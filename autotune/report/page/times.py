"""Where time goes: inside a generation cycle, and in the search itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from autotune.measurement import PHASES
from autotune.report.page.drawings import COLOURS, PHASE_COLOURS, Drawing, absent, laid_out, moving_knobs, named
from autotune.report.page.evidence import Evidence, Row

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

STEPS = (("load", COLOURS[4]), ("setup", COLOURS[5]), ("loop", COLOURS[0]), ("other", "#999999"))
"""What a probe's seconds went into, in the order in which they passed."""


def seconds_by_phase(evidence: Evidence) -> Drawing:
    """One generation cycle of the candidates that matter."""
    name, title = "seconds-by-phase", "Seconds of one generation cycle"
    shown = list(_timed(evidence))
    if not shown:
        return absent(
            name,
            title,
            "No cycle was timed: predictions know seconds only in all." if evidence.predicted else "No cycle was timed.",
        )
    return Drawing(
        id=name,
        title=title,
        says="Measured wall seconds of the slowest rank, from one rollout to the next, at the longest lengths.",
        figure=_cycle_figure(shown),
        headers=("candidate", *PHASES, "other", "sum"),
        rows=tuple(
            (label, *(f"{each.get(phase, 0):.2f}" for phase in (*PHASES, "other")), f"{sum(each.values()):.2f}")
            for label, each in shown
        ),
    )


def _timed(evidence: Evidence) -> Iterator[tuple[str, dict[str, float]]]:
    best, names = evidence.recommendation, moving_knobs(evidence)
    if best is not None and best.certificate:
        row = Row(
            knobs={},
            timed_cycles=best.certificate.get("timed_cycles", 0),
            phase_seconds=best.certificate.get("phase_seconds", {}),
        )
        if row.timed_cycles:
            yield "recommended", _per_cycle(row)
    if evidence.baseline is not None and evidence.baseline.timed_cycles:
        yield "baseline", _per_cycle(evidence.baseline)
    for row in evidence.runner_ups:
        if row.timed_cycles:
            yield named(row.knobs, names), _per_cycle(row)


def _per_cycle(row: Row) -> dict[str, float]:
    return {phase: seconds / row.timed_cycles for phase, seconds in row.phase_seconds.items() if seconds > 0}


def _cycle_figure(shown: Sequence[tuple[str, dict[str, float]]]) -> Figure:
    from plotly.graph_objects import Bar, Figure

    figure = Figure()
    labels = [_short(label) for label, _ in shown]
    for phase in (*PHASES, "other"):
        if any(each.get(phase) for _, each in shown):
            figure.add_trace(
                Bar(
                    y=labels,
                    x=[each.get(phase, 0) for _, each in shown],
                    name=phase,
                    orientation="h",
                    marker_color=PHASE_COLOURS[phase],
                )
            )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="seconds")
    return laid_out(figure, height=150 + 34 * len(shown), barmode="stack")


def search_time(evidence: Evidence) -> Drawing:
    """What was paid for, probe by probe."""
    name, title = "search-time", "Where the search spent its time"
    rows = [row for row in evidence.trials if row.seconds]
    if not rows:
        return absent(name, title, "Nothing was measured." if evidence.predicted else "No probe recorded what it cost.")
    names = moving_knobs(evidence)
    return Drawing(
        id=name,
        title=title,
        says="Every probe in the order in which it ran. Only those with a yellow part had to load a model or an engine first.",
        figure=_search_figure(rows, names),
        headers=("probe", "purpose", "candidate", "outcome", "seconds", "of them loading"),
        rows=tuple(
            (
                str(row.trial),
                row.purpose,
                named(row.knobs, names),
                row.outcome or "",
                f"{row.seconds.get('total', 0):.1f}",
                f"{row.seconds.get('load', 0):.1f}",
            )
            for row in rows
        ),
    )


def _search_figure(rows: Sequence[Row], names: Sequence[str]) -> Figure:
    from html import escape

    from plotly.graph_objects import Bar, Figure

    figure = Figure()
    for step, colour in STEPS:
        figure.add_trace(
            Bar(
                x=[f"{row.trial}" for row in rows], y=[_spent(row)[step] for row in rows], name=step, marker_color=colour,
                hovertext=[f"{escape(named(row.knobs, names))}<br>{escape(f'{row.purpose}, {row.outcome}')}" for row in rows],
            )
        )  # fmt: skip
    figure.update_xaxes(title_text="probe", type="category")
    figure.update_yaxes(title_text="seconds")
    return laid_out(figure, height=340, barmode="stack")


def _spent(row: Row) -> dict[str, float]:
    known = {step: row.seconds.get(step, 0.0) for step, _ in STEPS if step != "other"}
    return {**known, "other": max(0.0, row.seconds.get("total", 0.0) - sum(known.values()))}


def _short(label: str, letters: int = 34) -> str:
    return label if len(label) <= letters else label[: letters - 1] + "…"

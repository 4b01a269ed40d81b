"""Charts of time: within a generation cycle, and in the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.core.measurement import PHASES
from autotune.report.candidate_types import CandidateRow, RecommendationRow
from autotune.report.document_types import AnswerDocument
from autotune.report.html.charts import COLOURS, PHASE_COLOURS, Drawing, absent, labelled, laid_out, moving_knobs, named

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

STEPS = (("load", COLOURS[4]), ("setup", COLOURS[5]), ("loop", COLOURS[0]), ("other", "#999999"))
"""Stages of a probe in order of time."""


_COLUMNS = (*PHASES, "other")


@dataclass(frozen=True, kw_only=True)
class TimedCandidate:
    """Bar of the chart."""

    label: str
    says: str
    seconds: Mapping[str, float]  # of one cycle, by phase


def seconds_by_phase(answer: AnswerDocument) -> Drawing:
    """Draw one generation cycle of the main candidates."""
    name, title, names = "seconds-by-phase", "Seconds of one generation cycle", moving_knobs(answer)
    shown = []
    for label, row in labelled(answer):
        timed = row.confirmed if isinstance(row, RecommendationRow) else row  # of the recommendation, its confirmation
        if timed is not None and (cycles := int(timed.timed_cycles or 0)):
            each = {phase: seconds / cycles for phase, seconds in timed.phase_seconds.items() if seconds > 0}
            shown.append(TimedCandidate(label=label, says=named(row.knobs, names), seconds=each))
    if not shown:
        why = "No cycle was timed: predictions have total seconds only." if answer.predicted else "No cycle was timed."
        return absent(name, title, why)
    rows = []
    for one in shown:
        by_phase = (f"{one.seconds.get(phase, 0):.2f}" for phase in _COLUMNS)
        rows.append((f"{one.label}: {one.says}", *by_phase, f"{sum(one.seconds.values()):.2f}"))
    return Drawing(
        id=name,
        title=title,
        says="Measured wall seconds of the slowest rank, from one rollout to the next, at the longest lengths: the mean of its "
        "timed cycles. Tokens/s use the median, so a delayed cycle appears here and not there.",
        figure=_cycle_figure(shown),
        headers=("candidate", *_COLUMNS, "sum"),
        rows=tuple(rows),
    )


def _cycle_figure(shown: Sequence[TimedCandidate]) -> Figure:
    from html import escape

    from plotly.graph_objects import Bar, Figure

    figure = Figure()
    for phase in _COLUMNS:
        if any(one.seconds.get(phase) for one in shown):
            figure.add_trace(
                Bar(
                    y=[one.label for one in shown],
                    x=[one.seconds.get(phase, 0) for one in shown],
                    name=phase,
                    orientation="h",
                    marker_color=PHASE_COLOURS[phase],
                    hovertext=[escape(one.says) for one in shown],
                )
            )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="seconds")
    return laid_out(figure, height=150 + 34 * len(shown), barmode="stack")


def search_time(answer: AnswerDocument) -> Drawing:
    """Draw the seconds of every probe."""
    name, title = "search-time", "Time of the search"
    rows = [row for row in answer.trials if row.seconds]
    if not rows:
        return absent(name, title, "Nothing was measured." if answer.predicted else "No probe recorded its cost.")
    names = moving_knobs(answer)
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


def _search_figure(rows: Sequence[CandidateRow], names: Sequence[str]) -> Figure:
    from html import escape

    from plotly.graph_objects import Bar, Figure

    spent = []
    for row in rows:
        known = {step: row.seconds.get(step, 0.0) for step, _ in STEPS if step != "other"}
        spent.append({**known, "other": max(0.0, row.seconds.get("total", 0.0) - sum(known.values()))})
    figure = Figure()
    for step, colour in STEPS:
        figure.add_trace(
            Bar(
                x=[f"{row.trial}" for row in rows], y=[one[step] for one in spent], name=step, marker_color=colour,
                hovertext=[f"{escape(named(row.knobs, names))}<br>{escape(f'{row.purpose}, {row.outcome}')}" for row in rows],
            )
        )  # fmt: skip
    figure.update_xaxes(title_text="probe", type="category")
    figure.update_yaxes(title_text="seconds")
    return laid_out(figure, height=340, barmode="stack")

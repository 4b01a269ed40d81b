"""Charts of time: within a generation cycle, and in the search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.core.measurement import PHASES
from autotune.report.candidate_types import CandidateRow
from autotune.report.document_types import AnswerDocument
from autotune.report.html.charts import COLOURS, PHASE_COLOURS, Drawing, absent, laid_out, moving_knobs, named

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

STEPS = (("load", COLOURS[4]), ("setup", COLOURS[5]), ("loop", COLOURS[0]), ("other", "#999999"))
"""Stages of a probe in order of time."""


def seconds_by_phase(answer: AnswerDocument) -> Drawing:
    """Draw one generation cycle of the main candidates."""
    name, title = "seconds-by-phase", "Seconds of one generation cycle"
    shown = list(_timed(answer))
    if not shown:
        return absent(
            name,
            title,
            "No cycle was timed: predictions have total seconds only." if answer.predicted else "No cycle was timed.",
        )
    return Drawing(
        id=name,
        title=title,
        says="Measured wall seconds of the slowest rank, from one rollout to the next, at the longest lengths: the mean of its "
        "timed cycles. Tokens/s use the median, so a delayed cycle appears here and not there.",
        figure=_cycle_figure(shown),
        headers=("candidate", *PHASES, "other", "sum"),
        rows=tuple(
            (f"{one.label}: {one.says}", *(f"{one.seconds.get(phase, 0):.2f}" for phase in _COLUMNS), f"{one.sum:.2f}")
            for one in shown
        ),
    )


_COLUMNS = (*PHASES, "other")


@dataclass(frozen=True, kw_only=True)
class TimedCandidate:
    """Bar of the chart."""

    label: str
    says: str
    seconds: Mapping[str, float]
    """Seconds of one cycle by phase."""

    @property
    def sum(self) -> float:
        return sum(self.seconds.values())


def _timed(answer: AnswerDocument) -> Iterator[TimedCandidate]:
    """Yield the timed candidates, labelled as in the memory chart."""
    names = moving_knobs(answer)
    for label, row in (("recommended", _confirmed(answer)), ("baseline", answer.baseline), *_runner_ups(answer)):
        if row is not None and row.timed_cycles:
            yield TimedCandidate(label=label, says=named(row.knobs, names), seconds=_per_cycle(row))


def _confirmed(answer: AnswerDocument) -> CandidateRow | None:
    """Return the recommendation with its confirmation's times."""
    best = answer.recommendation
    measured = best.confirmed if best is not None else None
    if best is None or measured is None:
        return None
    return CandidateRow(knobs=best.knobs, timed_cycles=int(measured.timed_cycles or 0), phase_seconds=measured.phase_seconds)


def _runner_ups(answer: AnswerDocument) -> Iterator[tuple[str, CandidateRow]]:
    for number, row in enumerate(answer.runner_ups, start=1):
        yield f"runner-up {number}", row


def _per_cycle(row: CandidateRow) -> dict[str, float]:
    return {phase: seconds / row.timed_cycles for phase, seconds in row.phase_seconds.items() if seconds > 0}


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


def _spent(row: CandidateRow) -> dict[str, float]:
    known = {step: row.seconds.get(step, 0.0) for step, _ in STEPS if step != "other"}
    return {**known, "other": max(0.0, row.seconds.get("total", 0.0) - sum(known.values()))}

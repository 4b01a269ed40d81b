"""Charts of phases: memory by phase and predicted part, seconds of a generation cycle, and the
stages of each probe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import msgspec

from autotune.core.measurement import PHASES
from autotune.report.candidate_types import CandidateRow, RecommendationRow
from autotune.report.document_types import AnswerDocument
from autotune.report.html.charts import (
    COLOURS,
    GIB,
    PHASE_COLOURS,
    Drawing,
    absent,
    gib,
    labelled,
    laid_out,
    moving_knobs,
    named,
    told_apart,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


MAX_RUNNER_UPS = 3  # in the chart of memory
STEPS = (("load", COLOURS[4]), ("setup", COLOURS[5]), ("loop", COLOURS[0]), ("other", "#999999"))
"""Stages of a probe in order of time."""

_COLUMNS = (*PHASES, "other")


@dataclass(frozen=True, kw_only=True)
class ComparedCandidate:
    """Candidate of the chart."""

    label: str
    heading: str  # the label with the settings that differ from the recommendation's
    says: str
    measured: Mapping[str, float]  # peak by phase; may be empty
    parts: Mapping[str, Mapping[str, float]]  # predicted bytes by phase and part; may be empty


def memory_by_phase(answer: AnswerDocument) -> Drawing:
    """Draw the recommendation, the baseline and the next best."""
    name, title, names = "memory-by-phase", "Memory by phase", moving_knobs(answer)
    shown = []
    for label, row in labelled(
        msgspec.structs.replace(answer, runner_ups=answer.runner_ups[:MAX_RUNNER_UPS])
    ):
        phases = row.prediction.phases if row.prediction else ()
        parts = {
            phase.name: {part.name: part.bytes for part in phase.breakdown}
            for phase in phases
            if phase.breakdown
        }
        if row.phase_peak_bytes or parts:
            says = named(row.knobs, names)
            shown.append(
                ComparedCandidate(
                    label=label,
                    heading=told_apart(label, row, answer),
                    says=says,
                    measured=row.phase_peak_bytes,
                    parts=parts,
                )
            )
    if not shown:
        return absent(name, title, "Nothing was measured or predicted by phase.")
    reading = (
        ["Coloured bars are predicted, part by part."]
        if any(candidate.parts for candidate in shown)
        else []
    )
    if any(candidate.measured for candidate in shown):
        bars = f"Bars are {answer.basis} peaks. Without a prediction the parts are unknown."
        reading.append(f"Black-rimmed marks are {answer.basis} peaks." if reading else bars)
    measured = f"{'measured' if answer.predicted else answer.basis} peak GiB"
    return Drawing(
        id=name,
        title=title,
        says=" ".join([*reading, "The dashed line is the limit."]),
        figure=_memory_figure(answer, shown),
        headers=("candidate", "phase", measured, "predicted peak GiB", "predicted parts GiB"),
        rows=tuple(_rows(shown)),
    )


def _memory_figure(answer: AnswerDocument, shown: Sequence[ComparedCandidate]) -> Figure:
    from plotly.graph_objects import Bar, Figure, Scatter

    figure = Figure()
    parts = list(
        dict.fromkeys(
            part for candidate in shown for held in candidate.parts.values() for part in held
        )
    )
    for number, part in enumerate(parts):
        at = [
            (candidate.heading, phase, held[part])
            for candidate in shown
            for phase, held in candidate.parts.items()
            if held.get(part)
        ]
        figure.add_trace(
            Bar(
                **_across(at),
                name=part,
                orientation="h",
                marker_color=COLOURS[number % len(COLOURS)],
                marker_opacity=1.0 if number < len(COLOURS) else 0.5,  # the colours repeat
            )
        )
    measured = [
        (candidate.heading, phase, candidate.measured[phase])
        for candidate in shown
        for phase in PHASES
        if phase in candidate.measured
    ]
    if measured and parts:
        marker = {
            "color": "#ffffff",
            "line": {"color": "#000000", "width": 2},
            "size": 9,
            "symbol": "diamond",
        }
        figure.add_trace(
            Scatter(
                **_across(measured),
                mode="markers",
                name=f"{answer.basis} peak",
                marker=marker,
            )
        )
    elif measured:
        figure.add_trace(
            Bar(
                **_across(measured),
                name=f"{answer.basis} peak",
                orientation="h",
                marker_color=COLOURS[0],
            )
        )
    figure.add_vline(
        x=answer.question.memory_limit_bytes / GIB,
        line_dash="dash",
        line_color="#888888",
        annotation_text="limit",
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="GiB", rangemode="tozero")
    bars = len(
        {
            (candidate.label, phase)
            for candidate in shown
            for phase in {*candidate.measured, *candidate.parts}
        }
    )
    return laid_out(
        figure,
        height=140 + 26 * bars,
        barmode="stack",
        bargap=0.25,
    )


def _across(at: Sequence[tuple[str, str, float]]) -> dict[str, object]:
    return {
        "x": [size / GIB for _, _, size in at],
        "y": [[label for label, _, _ in at], [phase for _, phase, _ in at]],
    }


def _rows(shown: Sequence[ComparedCandidate]) -> Iterator[tuple[str, ...]]:
    for candidate in shown:
        for phase in PHASES:
            if phase in candidate.measured or phase in candidate.parts:
                sizes = candidate.parts.get(phase, {})
                parts = ", ".join(f"{name} {gib(size)}" for name, size in sizes.items() if size)
                predicted = gib(sum(sizes.values())) if sizes else "not predicted"
                yield (
                    f"{candidate.label}: {candidate.says}",
                    phase,
                    gib(candidate.measured.get(phase)),
                    predicted,
                    parts,
                )


def seconds_by_phase(answer: AnswerDocument) -> Drawing:
    """Draw one generation cycle of the main candidates."""
    name, title, names = "seconds-by-phase", "Seconds of one generation cycle", moving_knobs(answer)
    shown, rows = [], []
    for label, row in labelled(answer):
        timed = (
            row.confirmed if isinstance(row, RecommendationRow) else row
        )  # of the recommendation, its confirmation
        if timed is not None and (cycles := int(timed.timed_cycles or 0)):
            cycle_seconds = {
                phase: seconds / cycles
                for phase, seconds in timed.phase_seconds.items()
                if seconds > 0
            }
            says = named(row.knobs, names)
            shown.append((told_apart(label, row, answer), says, cycle_seconds))
            by_phase = (f"{cycle_seconds.get(phase, 0):.2f}" for phase in _COLUMNS)
            rows.append((f"{label}: {says}", *by_phase, f"{sum(cycle_seconds.values()):.2f}"))
    if not shown:
        why = (
            "No cycle was timed: predictions have total seconds only."
            if answer.predicted
            else "No cycle was timed."
        )
        return absent(name, title, why)
    return Drawing(
        id=name,
        title=title,
        says=(
            "Measured wall seconds of the slowest rank, from one rollout to the next, at the"
            " longest lengths: the mean of its timed cycles. Tokens/s use the median, so a delayed"
            " cycle appears here and not there."
        ),
        figure=_cycle_figure(shown),
        headers=("candidate", *_COLUMNS, "sum"),
        rows=tuple(rows),
    )


def _cycle_figure(shown: Sequence[tuple[str, str, Mapping[str, float]]]) -> Figure:
    """Draw (label, knobs as text, seconds of one cycle by phase) of each candidate."""
    from plotly.graph_objects import Bar, Figure

    figure = Figure()
    for phase in _COLUMNS:
        if any(seconds.get(phase) for _, _, seconds in shown):
            figure.add_trace(
                Bar(
                    y=[[label for label, _, _ in shown], ["cycle"] * len(shown)],
                    x=[seconds.get(phase, 0) for _, _, seconds in shown],
                    name=phase,
                    orientation="h",
                    marker_color=PHASE_COLOURS[phase],
                    hovertext=[escape(says) for _, says, _ in shown],
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
        return absent(
            name,
            title,
            "Nothing was measured." if answer.predicted else "No probe recorded its cost.",
        )
    names = moving_knobs(answer)
    return Drawing(
        id=name,
        title=title,
        says=(
            "Every probe in the order in which it ran. Only those with a yellow part had to load a"
            " model or an engine first."
        ),
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
    from plotly.graph_objects import Bar, Figure

    spent = []
    for row in rows:
        steps = {step: row.seconds.get(step, 0.0) for step, _ in STEPS if step != "other"}
        spent.append(
            {**steps, "other": max(0.0, row.seconds.get("total", 0.0) - sum(steps.values()))}
        )
    figure = Figure()
    for step, colour in STEPS:
        figure.add_trace(
            Bar(
                x=[f"{row.trial}" for row in rows],
                y=[seconds[step] for seconds in spent],
                name=step,
                marker_color=colour,
                hovertext=[_search_hover(row, names) for row in rows],
            )
        )
    figure.update_xaxes(title_text="probe", type="category")
    figure.update_yaxes(title_text="seconds")
    return laid_out(figure, height=340, barmode="stack")


def _search_hover(row: CandidateRow, names: Sequence[str]) -> str:
    knobs = escape(named(row.knobs, names))
    ending = escape(f"{row.purpose}, {row.outcome}")
    return f"{knobs}<br>{ending}"

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
    knobs_text,
    labelled,
    laid_out,
    moving_knobs,
    told_apart,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Bar, Figure, Scatter


MAX_CHARTED_RUNNER_UPS = 3  # in the chart of memory
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
    name = "memory-by-phase"
    title = "Memory by phase"
    candidates = _compared_candidates(answer)
    if not candidates:
        return absent(name, title, "Nothing was measured or predicted by phase.")
    measured = f"{'measured' if answer.predicted else answer.basis} peak GiB"
    return Drawing(
        id=name,
        title=title,
        says=f"{_explanation(answer, candidates)} The dashed line is the limit.",
        figure=_memory_figure(answer, candidates),
        headers=("candidate", "phase", measured, "predicted peak GiB", "predicted parts GiB"),
        rows=tuple(_rows(candidates)),
    )


def _compared_candidates(answer: AnswerDocument) -> list[ComparedCandidate]:
    """Return the candidates of the chart of which a phase is known."""
    names = moving_knobs(answer)
    runner_ups = answer.runner_ups[:MAX_CHARTED_RUNNER_UPS]
    candidates = []
    for label, row in labelled(msgspec.structs.replace(answer, runner_ups=runner_ups)):
        parts = _predicted_parts(row)
        if row.phase_peak_bytes or parts:
            candidates.append(
                ComparedCandidate(
                    label=label,
                    heading=told_apart(label, row, answer),
                    says=knobs_text(row.knobs, names),
                    measured=row.phase_peak_bytes,
                    parts=parts,
                )
            )
    return candidates


def _predicted_parts(row: CandidateRow | RecommendationRow) -> dict[str, dict[str, float]]:
    """Return the predicted bytes by phase and part."""
    parts: dict[str, dict[str, float]] = {}
    if row.prediction is None:
        return parts
    for phase in row.prediction.phases:
        if phase.breakdown:
            parts[phase.name] = {part.name: part.bytes for part in phase.breakdown}
    return parts


def _explanation(answer: AnswerDocument, candidates: Sequence[ComparedCandidate]) -> str:
    are_predicted = any(candidate.parts for candidate in candidates)
    are_measured = any(candidate.measured for candidate in candidates)
    if not are_predicted:
        return f"Bars are {answer.basis} peaks. Without a prediction the parts are unknown."
    says = "Coloured bars are predicted, part by part."
    if are_measured:
        says += f" Black-rimmed marks are {answer.basis} peaks."
    return says


PhaseBytes = tuple[str, str, float]
"""Heading of a candidate, phase, bytes."""


def _memory_figure(answer: AnswerDocument, candidates: Sequence[ComparedCandidate]) -> Figure:
    from plotly.graph_objects import Figure

    # 1. Predicted parts as bars, measured peaks as marks; as bars where nothing is predicted.
    figure = Figure()
    parts = _bytes_by_part(candidates)
    for number, (part, sizes) in enumerate(parts.items()):
        figure.add_trace(_part_bars(number, part, sizes))
    peaks = _measured_peaks(candidates)
    if peaks:
        figure.add_trace(_peaks(peaks, f"{answer.basis} peak", are_marks=bool(parts)))

    # 2. The limit and the axes.
    figure.add_vline(
        x=answer.question.memory_limit_bytes / GIB,
        line_dash="dash",
        line_color="#888888",
        annotation_text="limit",
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="GiB", rangemode="tozero")
    bars = sum(len({*candidate.measured, *candidate.parts}) for candidate in candidates)
    return laid_out(
        figure,
        height=140 + 26 * bars,
        barmode="stack",
        bargap=0.25,
    )


def _bytes_by_part(candidates: Sequence[ComparedCandidate]) -> dict[str, list[PhaseBytes]]:
    bytes_by_part: dict[str, list[PhaseBytes]] = {}
    for candidate in candidates:
        for phase, parts in candidate.parts.items():
            for part, size in parts.items():
                sizes = bytes_by_part.setdefault(part, [])
                if size:
                    sizes.append((candidate.heading, phase, size))
    return bytes_by_part


def _measured_peaks(candidates: Sequence[ComparedCandidate]) -> list[PhaseBytes]:
    peaks: list[PhaseBytes] = []
    for candidate in candidates:
        for phase in PHASES:
            if phase in candidate.measured:
                peaks.append((candidate.heading, phase, candidate.measured[phase]))
    return peaks


def _part_bars(
    number: int,
    part: str,
    sizes: Sequence[PhaseBytes],
) -> Bar:
    from plotly.graph_objects import Bar

    return Bar(
        **_across(sizes),
        name=part,
        orientation="h",
        marker_color=COLOURS[number % len(COLOURS)],
        marker_opacity=1.0 if number < len(COLOURS) else 0.5,  # the colours repeat
    )


def _peaks(
    peaks: Sequence[PhaseBytes],
    name: str,
    *,
    are_marks: bool,
) -> Bar | Scatter:
    from plotly.graph_objects import Bar, Scatter

    if not are_marks:
        return Bar(
            **_across(peaks),
            name=name,
            orientation="h",
            marker_color=COLOURS[0],
        )
    marker = {
        "color": "#ffffff",
        "line": {"color": "#000000", "width": 2},
        "size": 9,
        "symbol": "diamond",
    }
    return Scatter(
        **_across(peaks),
        mode="markers",
        name=name,
        marker=marker,
    )


def _across(phase_bytes: Sequence[PhaseBytes]) -> dict[str, object]:
    sizes = []
    headings = []
    phases = []
    for heading, phase, size in phase_bytes:
        sizes.append(size / GIB)
        headings.append(heading)
        phases.append(phase)
    return {"x": sizes, "y": [headings, phases]}


def _rows(candidates: Sequence[ComparedCandidate]) -> Iterator[tuple[str, ...]]:
    for candidate in candidates:
        for phase in PHASES:
            if phase in candidate.measured or phase in candidate.parts:
                sizes = candidate.parts.get(phase, {})
                parts = ", ".join(f"{name} {gib(size)}" for name, size in sizes.items() if size)
                predicted = "not predicted"
                if sizes:
                    predicted = gib(sum(sizes.values()))
                yield (
                    f"{candidate.label}: {candidate.says}",
                    phase,
                    gib(candidate.measured.get(phase)),
                    predicted,
                    parts,
                )


def seconds_by_phase(answer: AnswerDocument) -> Drawing:
    """Draw one generation cycle of the main candidates."""
    name = "seconds-by-phase"
    title = "Seconds of one generation cycle"
    names = moving_knobs(answer)

    # 1. The candidates whose cycles were timed, as bars and as rows of the table.
    shown = []
    rows = []
    for label, row in labelled(answer):
        cycle_seconds = _seconds_of_cycle(row)
        if cycle_seconds is None:
            continue
        says = knobs_text(row.knobs, names)
        shown.append((told_apart(label, row, answer), says, cycle_seconds))
        by_phase = (f"{cycle_seconds.get(phase, 0):.2f}" for phase in _COLUMNS)
        rows.append((f"{label}: {says}", *by_phase, f"{sum(cycle_seconds.values()):.2f}"))
    if not shown:
        why = "No cycle was timed."
        if answer.predicted:
            why = "No cycle was timed: predictions have total seconds only."
        return absent(name, title, why)

    # 2. The drawing.
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


def _seconds_of_cycle(row: CandidateRow | RecommendationRow) -> dict[str, float] | None:
    """Return the seconds of each phase in one cycle; None if no cycle was timed."""
    # Of the recommendation, its confirmation.
    timed = row.confirmed if isinstance(row, RecommendationRow) else row
    if timed is None or not timed.timed_cycles:
        return None
    cycle_seconds = {}
    for phase, seconds in timed.phase_seconds.items():
        if seconds > 0:
            cycle_seconds[phase] = seconds / timed.timed_cycles
    return cycle_seconds


def _cycle_figure(shown: Sequence[tuple[str, str, Mapping[str, float]]]) -> Figure:
    """Draw (label, knobs as text, seconds of one cycle by phase) of each candidate."""
    from plotly.graph_objects import Bar, Figure

    labels, texts, cycles = zip(*shown, strict=True)
    figure = Figure()
    for phase in _COLUMNS:
        seconds = [cycle_seconds.get(phase, 0) for cycle_seconds in cycles]
        if any(seconds):
            figure.add_trace(
                Bar(
                    y=[labels, ["cycle"] * len(shown)],
                    x=seconds,
                    name=phase,
                    orientation="h",
                    marker_color=PHASE_COLOURS[phase],
                    hovertext=list(map(escape, texts)),
                )
            )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="seconds")
    return laid_out(figure, height=150 + 34 * len(shown), barmode="stack")


def search_time(answer: AnswerDocument) -> Drawing:
    """Draw the seconds of every probe."""
    name = "search-time"
    title = "Time of the search"
    rows = [row for row in answer.trials if row.seconds]
    if not rows:
        why = "Nothing was measured." if answer.predicted else "No probe recorded its cost."
        return absent(name, title, why)
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
        rows=tuple(_probe_cells(row, names) for row in rows),
    )


def _probe_cells(row: CandidateRow, names: Sequence[str]) -> tuple[str, ...]:
    """Return the table's row of one probe."""
    total = row.seconds.get("total", 0)
    load = row.seconds.get("load", 0)
    return (
        str(row.trial),
        row.purpose,
        knobs_text(row.knobs, names),
        row.outcome or "",
        f"{total:.1f}",
        f"{load:.1f}",
    )


def _search_figure(rows: Sequence[CandidateRow], names: Sequence[str]) -> Figure:
    from plotly.graph_objects import Bar, Figure

    spent = []
    for row in rows:
        steps = {}
        for step, _ in STEPS:
            if step != "other":
                steps[step] = row.seconds.get(step, 0.0)
        total_seconds = row.seconds.get("total", 0.0)
        rest_seconds = total_seconds - sum(steps.values())
        spent.append({**steps, "other": max(0.0, rest_seconds)})
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
    knobs = escape(knobs_text(row.knobs, names))
    ending = escape(f"{row.purpose}, {row.outcome}")
    return f"{knobs}<br>{ending}"

"""Chart of memory by phase, and by predicted part, against the limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from autotune.core.measurement import PHASES
from autotune.report.document_types import AnswerDocument
from autotune.report.html.charts import COLOURS, GIB, Drawing, absent, gib, labelled, laid_out, moving_knobs, named

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NAME, TITLE = "memory-by-phase", "Memory by phase"
MAX_RUNNER_UPS = 3


@dataclass(frozen=True, kw_only=True)
class ComparedCandidate:
    """Candidate of the chart."""

    label: str
    says: str
    measured: Mapping[str, float]  # peak by phase; may be empty
    parts: Mapping[str, Mapping[str, float]]  # predicted bytes by phase and part; may be empty


def memory_by_phase(answer: AnswerDocument) -> Drawing:
    """Draw the recommendation, the baseline and the next best."""
    names, shown = moving_knobs(answer), []
    for label, row in labelled(msgspec.structs.replace(answer, runner_ups=answer.runner_ups[:MAX_RUNNER_UPS])):
        phases = row.prediction.phases if row.prediction else ()
        parts = {phase.name: {part.name: part.bytes for part in phase.breakdown} for phase in phases if phase.breakdown}
        if row.phase_peak_bytes or parts:
            says = named(row.knobs, names)
            shown.append(ComparedCandidate(label=label, says=says, measured=row.phase_peak_bytes, parts=parts))
    if not shown:
        return absent(NAME, TITLE, "Nothing was measured or predicted by phase.")
    reading = ["Coloured bars are predicted, part by part."] if any(one.parts for one in shown) else []
    if any(one.measured for one in shown):
        bars = f"Bars are {answer.basis} peaks. Without a prediction the parts are unknown."
        reading.append(f"Black-rimmed marks are {answer.basis} peaks." if reading else bars)
    measured = f"{'measured' if answer.predicted else answer.basis} peak GiB"
    return Drawing(
        id=NAME,
        title=TITLE,
        says=" ".join([*reading, "The dashed line is the limit."]),
        figure=_figure(answer, shown),
        headers=("candidate", "phase", measured, "predicted peak GiB", "predicted parts GiB"),
        rows=tuple(_rows(shown)),
    )


def _figure(answer: AnswerDocument, shown: Sequence[ComparedCandidate]) -> Figure:
    from plotly.graph_objects import Bar, Figure, Scatter

    figure = Figure()
    parts = list(dict.fromkeys(part for one in shown for held in one.parts.values() for part in held))
    for number, part in enumerate(parts):
        at = [(one.label, phase, held[part]) for one in shown for phase, held in one.parts.items() if held.get(part)]
        figure.add_trace(
            Bar(
                **_across(at),
                name=part,
                orientation="h",
                marker_color=COLOURS[number % len(COLOURS)],
                marker_opacity=1.0 if number < len(COLOURS) else 0.5,  # the colours repeat
            )
        )
    measured = [(one.label, phase, one.measured[phase]) for one in shown for phase in PHASES if phase in one.measured]
    if measured and parts:
        marker = {"color": "#ffffff", "line": {"color": "#000000", "width": 2}, "size": 9, "symbol": "diamond"}
        figure.add_trace(Scatter(**_across(measured), mode="markers", name=f"{answer.basis} peak", marker=marker))
    elif measured:
        figure.add_trace(Bar(**_across(measured), name=f"{answer.basis} peak", orientation="h", marker_color=COLOURS[0]))
    figure.add_vline(x=answer.question.memory_limit_bytes / GIB, line_dash="dash", line_color="#888888", annotation_text="limit")
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="GiB", rangemode="tozero")
    bars = len({(one.label, phase) for one in shown for phase in {*one.measured, *one.parts}})
    return laid_out(figure, height=140 + 26 * bars, barmode="stack", bargap=0.25)


def _across(at: Sequence[tuple[str, str, float]]) -> dict[str, object]:
    return {"x": [size / GIB for _, _, size in at], "y": [[label for label, _, _ in at], [phase for _, phase, _ in at]]}


def _rows(shown: Sequence[ComparedCandidate]) -> Iterator[tuple[str, ...]]:
    for one in shown:
        for phase in PHASES:
            if phase in one.measured or phase in one.parts:
                held = one.parts.get(phase, {})
                parts = ", ".join(f"{name} {gib(size)}" for name, size in held.items() if size)
                predicted = gib(sum(held.values())) if held else "not predicted"
                yield f"{one.label}: {one.says}", phase, gib(one.measured.get(phase)), predicted, parts

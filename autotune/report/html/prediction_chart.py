"""Chart of predicted against measured figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autotune.report.candidate_types import CandidateRow, IntervalRow, PredictionRow
from autotune.report.document_types import AnswerDocument
from autotune.report.html.charts import (
    COLOURS,
    GIB,
    Drawing,
    absent,
    gib,
    knobs_text,
    laid_out,
    moving_knobs,
    rate,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def predicted_against_measured(answer: AnswerDocument) -> Drawing:
    """Draw the measured candidates that were predicted: their peaks and their speeds."""
    name = "predicted-against-measured"
    title = "Predicted against measured"
    names = moving_knobs(answer)
    rows = []
    for row in answer.probes:
        if row.prediction is not None and row.outcome == "ok":
            rows.append((row, row.prediction))
    if not rows:
        if answer.predicted:
            return absent(name, title, "Nothing was measured yet.")
        return absent(name, title, "No measured candidate was predicted: predictions are for GPUs.")
    return Drawing(
        id=name,
        title="Predicted against emulated" if answer.emulated else title,
        says=(
            "At the longest lengths. On the line, both agree. Bars are the predictions' own"
            " intervals."
        ),
        figure=_prediction_figure(rows, answer.basis),
        headers=(
            "candidate",
            "predicted peak GiB",
            f"{answer.basis} peak GiB",
            "predicted tokens/s",
            f"{answer.basis} tokens/s",
        ),
        rows=tuple(_cells(*pair, names) for pair in rows),
    )


def _cells(row: CandidateRow, predicted: PredictionRow, names: Sequence[str]) -> tuple[str, ...]:
    """Return the table's row of one candidate."""
    return (
        knobs_text(row.knobs, names),
        gib(_value(predicted.peak_memory_bytes)),
        gib(row.peak_memory_bytes),
        rate(_value(predicted.tokens_per_second)),
        rate(row.rate_at_longest),
    )


def _value(span: IntervalRow | None) -> float | None:
    return span.value if span else None


Pair = tuple[IntervalRow, float]
"""A prediction's interval, and what was measured."""


def _prediction_figure(rows: Sequence[tuple[CandidateRow, PredictionRow]], basis: str) -> Figure:
    from plotly.subplots import make_subplots

    peaks: list[Pair] = []
    speeds: list[Pair] = []
    for row, predicted in rows:
        if row.fits:
            _add_pair(peaks, predicted.peak_memory_bytes, row.peak_memory_bytes)
        _add_pair(speeds, predicted.tokens_per_second, row.rate_at_longest)
    figure = make_subplots(
        rows=1,
        cols=2,
        horizontal_spacing=0.14,
    )
    if peaks:
        _draw_panel(figure, 1, peaks, GIB)
        _label_axes(figure, 1, "peak, GiB", basis)
    if speeds:
        _draw_panel(figure, 2, speeds, 1.0)
        _label_axes(figure, 2, "tokens/s", basis)
    return laid_out(figure, height=360)


def _add_pair(
    pairs: list[Pair],
    span: IntervalRow | None,
    measured: float | None,
) -> None:
    if span is not None and measured is not None:
        pairs.append((span, measured))


def _draw_panel(
    figure: Figure,
    column: int,
    pairs: Sequence[Pair],
    unit: float,
) -> None:
    """Draw the points with the predictions' intervals, and the line on which both agree."""
    from plotly.graph_objects import Scatter

    # 1. The points.
    x = []
    y = []
    above = []
    below = []
    for span, measured in pairs:
        x.append(span.value / unit)
        y.append(measured / unit)
        above.append((span.high - span.value) / unit)
        below.append((span.value - span.low) / unit)
    spread = {
        "type": "data",
        "symmetric": False,
        "thickness": 1,
        "array": above,
        "arrayminus": below,
    }
    points = Scatter(
        x=x,
        y=y,
        error_x=spread,
        mode="markers",
        marker={"color": COLOURS[0], "size": 9},
        showlegend=False,
    )
    figure.add_trace(
        points,
        row=1,
        col=column,
    )

    # 2. The line, which a single point on it would not have.
    ends = [min(*x, *y), max(*x, *y)]
    if ends[0] == ends[1]:
        ends[0] = 0
    line = Scatter(
        x=ends,
        y=ends,
        mode="lines",
        line={"color": "#888888", "dash": "dot"},
        showlegend=False,
        hoverinfo="skip",
    )
    figure.add_trace(
        line,
        row=1,
        col=column,
    )


def _label_axes(
    figure: Figure,
    column: int,
    label: str,
    basis: str,
) -> None:
    figure.update_xaxes(
        title_text=f"predicted {label}",
        row=1,
        col=column,
    )
    figure.update_yaxes(
        title_text=f"{basis} {label}",
        row=1,
        col=column,
    )

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
    table = []
    for row in answer.probes:
        if row.prediction is not None and row.outcome == "ok":
            rows.append((row, row.prediction))
            table.append(
                (
                    knobs_text(row.knobs, names),
                    gib(_value(row.prediction.peak_memory_bytes)),
                    gib(row.peak_memory_bytes),
                    rate(_value(row.prediction.tokens_per_second)),
                    rate(row.rate_at_longest),
                )
            )
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
        rows=tuple(table),
    )


def _value(span: IntervalRow | None) -> float | None:
    return span.value if span else None


def _prediction_figure(rows: Sequence[tuple[CandidateRow, PredictionRow]], basis: str) -> Figure:
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=1,
        cols=2,
        horizontal_spacing=0.14,
    )
    peaks = []
    speeds = []
    for row, predicted in rows:
        speeds.append((predicted.tokens_per_second, row.rate_at_longest))
        if row.fits:
            peaks.append((predicted.peak_memory_bytes, row.peak_memory_bytes))
    for column, (spans, unit, label) in enumerate(
        ((peaks, GIB, "peak, GiB"), (speeds, 1.0, "tokens/s")), start=1
    ):
        pairs = [(span, measured) for span, measured in spans if span and measured is not None]
        if not pairs:
            continue
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
        marker = {"color": COLOURS[0], "size": 9}
        figure.add_trace(
            Scatter(
                x=x,
                y=y,
                error_x=spread,
                mode="markers",
                marker=marker,
                showlegend=False,
            ),
            row=1,
            col=column,
        )
        ends = [min(*x, *y), max(*x, *y)]
        if len(x) == 1 and x == y:
            ends = [0, x[0]]
        line = {"color": "#888888", "dash": "dot"}
        figure.add_trace(
            Scatter(
                x=ends,
                y=ends,
                mode="lines",
                line=line,
                showlegend=False,
                hoverinfo="skip",
            ),
            row=1,
            col=column,
        )
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
    return laid_out(figure, height=360)

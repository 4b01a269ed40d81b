"""Chart of predicted against measured figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autotune.report.candidate_types import CandidateRow, IntervalRow, PredictionRow
from autotune.report.document_types import AnswerDocument
from autotune.report.html.charts import COLOURS, GIB, Drawing, absent, gib, laid_out, moving_knobs, named, rate

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NAME, TITLE = "predicted-against-measured", "Predicted against measured"

Reading = tuple[Callable[[PredictionRow], IntervalRow | None], Callable[[CandidateRow], float | None], float, str]

READINGS: tuple[Reading, ...] = (
    (lambda one: one.peak_memory_bytes, lambda row: row.peak_memory_bytes if row.fits else None, GIB, "peak, GiB"),
    (lambda one: one.tokens_per_second, lambda row: row.rate_at_longest, 1.0, "tokens/s"),
)


def predicted_against_measured(answer: AnswerDocument) -> Drawing:
    rows = [row for row in answer.probes if row.prediction is not None and row.outcome == "ok"]
    if not rows:
        unpredicted = "No measured candidate was predicted: predictions are for GPUs."
        return absent(NAME, TITLE, "Nothing was measured yet." if answer.predicted else unpredicted)
    names = moving_knobs(answer)
    table = []
    for row in rows:
        predicted = row.prediction or PredictionRow()
        peak, speed = (one.value if one else None for one in (predicted.peak_memory_bytes, predicted.tokens_per_second))
        table.append((named(row.knobs, names), gib(peak), gib(row.peak_memory_bytes), rate(speed), rate(row.rate_at_longest)))
    return Drawing(
        id=NAME,
        title=TITLE if not answer.emulated else "Predicted against emulated",
        says="At the longest lengths. On the line, both agree. Bars are the predictions' own intervals.",
        figure=_figure(rows, answer.basis),
        headers=("candidate", "predicted peak GiB", f"{answer.basis} peak GiB", "predicted tokens/s", f"{answer.basis} tokens/s"),
        rows=tuple(table),
    )


def _figure(rows: Sequence[CandidateRow], basis: str) -> Figure:
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.14)
    for column, (predicted, measured, unit, label) in enumerate(READINGS, start=1):
        pairs = [
            (span, seen)
            for row in rows
            if row.prediction and (span := predicted(row.prediction)) and (seen := measured(row)) is not None
        ]
        if not pairs:
            continue
        x = [span.value / unit for span, _ in pairs]
        spread = {
            "type": "data", "symmetric": False, "thickness": 1,
            "array": [(span.high - span.value) / unit for span, _ in pairs],
            "arrayminus": [(span.value - span.low) / unit for span, _ in pairs],
        }  # fmt: skip
        y = [seen / unit for _, seen in pairs]
        marker = {"color": COLOURS[0], "size": 9}
        figure.add_trace(Scatter(x=x, y=y, error_x=spread, mode="markers", marker=marker, showlegend=False), row=1, col=column)
        ends = [min(*x, *y), max(*x, *y)] if len(x) > 1 or x != y else [0, x[0]]
        line = {"color": "#888888", "dash": "dot"}
        figure.add_trace(Scatter(x=ends, y=ends, mode="lines", line=line, showlegend=False, hoverinfo="skip"), row=1, col=column)
        figure.update_xaxes(title_text=f"predicted {label}", row=1, col=column)
        figure.update_yaxes(title_text=f"{basis} {label}", row=1, col=column)
    return laid_out(figure, height=360)

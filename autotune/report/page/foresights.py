"""Predicted against measured, where both are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autotune.report.page.drawings import COLOURS, GIB, Drawing, absent, gib, laid_out, moving_knobs, named, rate
from autotune.report.page.evidence import Evidence, Predicted, Row, Span

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NAME, TITLE = "predicted-against-measured", "Predicted against measured"

Reading = tuple[Callable[[Predicted], Span | None], Callable[[Row], float | None], float, str]

READINGS: tuple[Reading, ...] = (
    (lambda one: one.peak_memory_bytes, lambda row: row.peak_memory_bytes if row.fits else None, GIB, "peak, GiB"),
    (lambda one: one.tokens_per_second, lambda row: row.rate, 1.0, "tokens/s"),
)


def predicted_against_measured(evidence: Evidence) -> Drawing:
    rows = [row for row in evidence.probes if row.prediction is not None and row.outcome == "ok"]
    if not rows:
        why = (
            "Nothing was measured yet."
            if evidence.predicted
            else "No measured candidate had been predicted: predictions are for GPUs."
        )
        return absent(NAME, TITLE, why)
    names = moving_knobs(evidence)
    return Drawing(
        id=NAME,
        title=TITLE,
        says="On the line, both agree. Bars are the predictions' own intervals.",
        figure=_figure(rows),
        headers=("candidate", "predicted peak GiB", "measured peak GiB", "predicted tokens/s", "measured tokens/s"),
        rows=tuple(_row(row, named(row.knobs, names)) for row in rows),
    )


def _row(row: Row, name: str) -> tuple[str, ...]:
    foreseen = row.prediction or Predicted()
    peak, speed = foreseen.peak_memory_bytes, foreseen.tokens_per_second
    return (
        name,
        gib(peak.value if peak else None),
        gib(row.peak_memory_bytes),
        rate(speed.value if speed else None),
        rate(row.rate),
    )


def _figure(rows: Sequence[Row]) -> Figure:
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.14)
    for column, (foreseen, measured, unit, label) in enumerate(READINGS, start=1):
        pairs = [
            (span, seen)
            for row in rows
            if row.prediction and (span := foreseen(row.prediction)) and (seen := measured(row)) is not None
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
        figure.update_yaxes(title_text=f"measured {label}", row=1, col=column)
    return laid_out(figure, height=360)

"""Charts of candidates: speed against memory, and predicted against measured figures; the parts
that all charts share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from autotune.core.space import setting_text
from autotune.report.candidate_types import (
    CandidateRow,
    IntervalRow,
    PredictionRow,
    RecommendationRow,
)
from autotune.report.document_types import AnswerDocument

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


GIB = 2**30

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999933")
"""Colours for any colour vision, on white and on black (after Okabe and Ito)."""

PHASE_COLOURS = dict(
    zip(
        ("load", "rollout", "sync", "reward", "score", "forward", "backward", "optimizer"),
        COLOURS,
        strict=True,
    ),
    other="#999999",
)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Figure of the page."""

    id: str
    title: str
    says: str  # one sentence on how to read it
    figure: Figure | None  # None without data; `says` then has the reason

    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def absent(
    name: str,
    title: str,
    why: str,
) -> Drawing:
    """Return a drawing without data, with the reason."""
    return Drawing(
        id=name,
        title=title,
        says=why,
        figure=None,
    )


def laid_out(figure: Figure, *, height: int, **layout: Any) -> Figure:
    """Apply the page's style: transparent for dark mode, the legend above for narrow screens."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 10, "r": 10, "t": 48, "b": 10},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.0,
            "yref": "paper",
            "x": 0,
            "traceorder": "normal",
        },
        hoverlabel={"align": "left"},
        **layout,
    )
    grid = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False, "automargin": True}
    figure.update_xaxes(**grid)
    figure.update_yaxes(**grid)
    return figure


def moving_knobs(answer: AnswerDocument) -> tuple[str, ...]:
    """Return the knobs with several values, which name the candidates."""
    shown = (*answer.trials, *answer.runner_ups, answer.baseline, answer.recommendation)
    rows = [row.knobs for row in shown if row is not None]
    values: dict[str, set[str]] = {}
    for knobs in rows:
        values.update((name, set()) for name in knobs if name not in values)
    for name, texts in values.items():
        texts.update(str(knobs.get(name, "-")) for knobs in rows)
    return tuple(name for name, texts in values.items() if len(texts) > 1)


def labelled(answer: AnswerDocument) -> Iterator[tuple[str, RecommendationRow | CandidateRow]]:
    """Yield the main candidates with their names on the page."""
    if answer.recommendation is not None:
        yield "recommended", answer.recommendation
    if answer.baseline is not None:
        yield "baseline", answer.baseline
    for number, row in enumerate(answer.runner_ups, start=1):
        yield f"runner-up {number}", row


def told_apart(
    label: str,
    row: RecommendationRow | CandidateRow,
    answer: AnswerDocument,
) -> str:
    """Return the label with the settings in which the candidate differs from the recommendation."""
    best = answer.recommendation
    if best is None or row is best:
        return label
    differing = [name for name in moving_knobs(answer) if _differs(name, row.knobs, best.knobs)]
    return f"{label}: {knobs_text(row.knobs, differing)}" if differing else label


def _differs(
    name: str,
    knobs: Mapping[str, Any],
    other_knobs: Mapping[str, Any],
) -> bool:
    return name in knobs and knobs[name] != other_knobs.get(name)


def knobs_text(knobs: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return a candidate's moving knobs as text."""
    texts = [f"{name}={setting_text(knobs[name])}" for name in names if name in knobs]
    return ", ".join(texts) or "the only candidate"


def gib(size: float | None) -> str:
    return "not known" if size is None else f"{size / GIB:.2f}"


def rate(tokens: float | None) -> str:
    return "not known" if tokens is None else f"{tokens:,.0f}"


RECOMMENDED = "recommended"


def speed_against_memory(answer: AnswerDocument) -> Drawing:
    """Draw fitting candidates left of the limit, and failed ones, which have no speed, in a
    strip below.
    """
    rows = _candidates(answer)
    word = answer.basis
    title = "Speed against memory"
    if not _with_peak(rows):
        return absent(
            "speed-against-memory",
            title,
            "No candidate was measured or predicted far enough to have a peak.",
        )
    lengths = "speed as well"
    if answer.question.typical_completion_length:
        lengths = "speed at typical ones"
    table = []
    for row in rows:
        name = knobs_text(row.knobs, moving_knobs(answer))
        outcome = row.outcome or word
        table.append((name, outcome, rate(row.rate), gib(row.peak_memory_bytes)))
    return Drawing(
        id="speed-against-memory",
        title=title,
        says=(
            f"Each point is a candidate, {word}: memory at the longest lengths, {lengths}. Further"
            " up is faster; the dashed line is the limit. The stepped line joins the candidates"
            " that no other one beats in both. The strip below has the failed ones."
        ),
        figure=_speed_figure(answer, rows),
        headers=("candidate", "outcome", "tokens/s", "peak GiB"),
        rows=tuple(table),
    )


def _candidates(answer: AnswerDocument) -> list[CandidateRow]:
    """Return each candidate once; the recommended one with its confirmation's figures."""
    best = answer.recommendation
    chosen = []
    if best is not None:
        speed = best.tokens_per_second
        peak = best.peak_memory_bytes
        row = CandidateRow(
            knobs=best.knobs,
            outcome=RECOMMENDED,
            basis=answer.basis,
            fits=True,
            tokens_per_second=speed,
            peak_memory_bytes=peak,
        )
        chosen.append(row)
    if answer.trials:
        return [row for row in answer.probes if best is None or row.knobs != best.knobs] + chosen
    for candidate in (answer.baseline, answer.nearest_miss, *answer.runner_ups):
        if candidate is not None:
            chosen.append(candidate)
    return chosen


def _speed_figure(answer: AnswerDocument, rows: Sequence[CandidateRow]) -> Figure:
    from plotly.subplots import make_subplots

    # 1. The candidates by outcome.
    fitting = []
    recommended = []
    unlike = []
    failed = []
    for row in rows:
        if row.rate is None or row.fits is False:
            failed.append(row)
        elif not _learns_the_same(row, answer):
            unlike.append(row)
        elif row.outcome == RECOMMENDED:
            recommended.append(row)
        else:
            fitting.append(row)

    # 2. Their points.
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        row_heights=[0.8, 0.2],
        vertical_spacing=0.06,
    )
    names = moving_knobs(answer)
    _points(figure, fitting, names, "fits", COLOURS[0], "circle", 1)
    _points(figure, unlike, names, "fits, other learning knobs", COLOURS[5], "circle-open", 1)
    _points(figure, failed, names, "does not fit, or failed", COLOURS[1], "x", 2)
    _frontier(figure, [*fitting, *recommended])
    _points(figure, recommended, names, RECOMMENDED, COLOURS[2], "star", 1)

    # 3. The limit and the axes.
    figure.add_vline(
        x=answer.question.memory_limit_bytes / GIB,
        line_dash="dash",
        line_color="#888888",
        annotation_text="limit",
    )
    figure.update_yaxes(
        title_text="tokens/s",
        row=1,
        col=1,
        rangemode="tozero",
    )
    figure.update_yaxes(
        visible=False,
        row=2,
        col=1,
    )
    figure.update_xaxes(
        title_text="peak memory, GiB",
        row=2,
        col=1,
    )
    return laid_out(figure, height=460)


def _learns_the_same(row: CandidateRow, answer: AnswerDocument) -> bool:
    return all(row.knobs.get(name) == value for name, value in answer.learning.items())


def _with_peak(rows: Iterable[CandidateRow]) -> list[CandidateRow]:
    return [row for row in rows if row.peak_memory_bytes is not None]


def _points(
    figure: Figure,
    rows: Sequence[CandidateRow],
    names: Sequence[str],
    label: str,
    colour: str,
    symbol: str,
    strip: int,
) -> None:
    from plotly.graph_objects import Scatter

    metered = _with_peak(rows)
    if not metered:
        return
    hover = []
    for row in metered:
        speed = ""
        if row.rate is not None:
            speed = f"{rate(row.rate)} tokens/s, "
        settings = escape(knobs_text(row.knobs, names)).replace(", ", "<br>")
        hover.append(
            f"{settings}<br>{speed}{gib(row.peak_memory_bytes)}"
            f" GiB<br>{escape(row.outcome or row.basis)}"
        )
    figure.add_trace(
        Scatter(
            x=[(row.peak_memory_bytes or 0) / GIB for row in metered],
            y=[row.rate if strip == 1 else 0 for row in metered],
            mode="markers",
            name=label,
            marker={"color": colour, "symbol": symbol, "size": 16 if symbol == "star" else 10},
            hovertext=hover,
            hoverinfo="text",
        ),
        row=strip,
        col=1,
    )


def frontier(rows: Sequence[CandidateRow]) -> list[CandidateRow]:
    """Return the Pareto frontier of speed and memory, smallest first."""
    best: list[CandidateRow] = []
    for row in sorted(
        rows, key=lambda candidate: (candidate.peak_memory_bytes or 0, -(candidate.rate or 0))
    ):
        if not best or (row.rate or 0) > (best[-1].rate or 0):
            best.append(row)
    return best


def _frontier(figure: Figure, rows: Sequence[CandidateRow]) -> None:
    from plotly.graph_objects import Scatter

    edge = frontier(_with_peak(rows))
    if len(edge) < 2:
        return
    line = {"color": COLOURS[0], "width": 1, "shape": "hv"}
    x = [(row.peak_memory_bytes or 0) / GIB for row in edge]
    y = [row.rate for row in edge]
    figure.add_trace(
        Scatter(
            x=x,
            y=y,
            mode="lines",
            line=line,
            name="frontier",
            hoverinfo="skip",
        ),
        row=1,
        col=1,
    )


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

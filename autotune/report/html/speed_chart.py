"""Chart of speed against memory: the candidates, the limit, and the frontier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from autotune.report.candidate_types import CandidateRow
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

    # 1. Words that depend on the answer.
    lengths = "speed as well"
    if answer.question.typical_completion_length:
        lengths = "speed at typical ones"
    bars = ""
    if any(row.rate_spread for row in rows):
        bars = "Bars are the 95 % intervals of measured speeds. "

    # 2. The table, and the drawing.
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
            f" that no other one beats in both. {bars}The strip below has the failed ones."
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
            spread=best.spread,
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
            error_y=_error_bars(metered, colour),
            hovertext=hover,
            hoverinfo="text",
        ),
        row=strip,
        col=1,
    )


def _error_bars(rows: Sequence[CandidateRow], colour: str) -> dict[str, object]:
    """Return the intervals of measured speeds, runs of one candidate among them."""
    half_widths = []
    for row in rows:
        half_width = 0.0
        if row.rate is not None and row.rate_spread is not None:
            half_width = row.rate * row.rate_spread
        half_widths.append(half_width)
    return {
        "array": half_widths,
        "color": colour,
        "thickness": 1,
        "visible": any(half_widths),
    }


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

"""Chart of tokens per second against memory: every candidate, the limit, and the Pareto frontier."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from autotune.report.candidate_types import CandidateRow
from autotune.report.document_types import AnswerDocument
from autotune.report.html.charts import COLOURS, GIB, Drawing, absent, gib, laid_out, moving_knobs, named, rate

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NAME, TITLE = "speed-against-memory", "Speed against memory"
RECOMMENDED = "recommended"


def speed_against_memory(answer: AnswerDocument) -> Drawing:
    """Draw fitting candidates left of the limit, and failed ones, which have no speed, in a strip below."""
    rows = _candidates(answer)
    if not any(row.peak_memory_bytes is not None for row in rows):
        return absent(NAME, TITLE, "No candidate was measured or predicted far enough to have a peak.")
    word = answer.basis
    lengths = "speed at typical ones" if answer.question.typical_completion_length else "speed as well"
    return Drawing(
        id=NAME,
        title=TITLE,
        says=f"Each point is a candidate, {word}: memory at the longest lengths, {lengths}. Further up is faster; "
        "the dashed line is the limit. The stepped line joins the candidates that no other one beats in both. "
        "The strip below has the failed ones.",
        figure=_figure(answer, rows),
        headers=("candidate", "outcome", "tokens/s", "peak GiB"),
        rows=tuple(
            (named(row.knobs, moving_knobs(answer)), row.outcome or word, rate(row.rate), gib(row.peak_memory_bytes))
            for row in rows
        ),
    )


def _candidates(answer: AnswerDocument) -> list[CandidateRow]:
    """Return each candidate once; the recommended one with its confirmation's figures."""
    best, chosen = answer.recommendation, []
    if best is not None:
        speed, peak = best.tokens_per_second, best.peak_memory_bytes
        row = CandidateRow(
            knobs=best.knobs, outcome=RECOMMENDED, basis=answer.basis, fits=True, tokens_per_second=speed, peak_memory_bytes=peak
        )
        chosen.append(row)
    if answer.trials:
        return [row for row in answer.probes if best is None or row.knobs != best.knobs] + chosen
    return [*chosen, *(row for row in (answer.baseline, answer.nearest_miss, *answer.runner_ups) if row is not None)]


def _figure(answer: AnswerDocument, rows: Sequence[CandidateRow]) -> Figure:
    from plotly.subplots import make_subplots

    failed = [row for row in rows if row.rate is None or row.fits is False]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.8, 0.2], vertical_spacing=0.06)
    same = [row for row in rows if row not in failed and _learns_the_same(row, answer)]
    other = [row for row in rows if row not in failed and not _learns_the_same(row, answer)]
    names = moving_knobs(answer)
    _points(figure, [row for row in same if row.outcome != RECOMMENDED], names, "fits", COLOURS[0], "circle", 1)
    _points(figure, other, names, "fits, other learning knobs", COLOURS[5], "circle-open", 1)
    _points(figure, failed, names, "does not fit, or failed", COLOURS[1], "x", 2)
    _frontier(figure, same)
    _points(figure, [row for row in same if row.outcome == RECOMMENDED], names, RECOMMENDED, COLOURS[2], "star", 1)
    figure.add_vline(x=answer.question.memory_limit_bytes / GIB, line_dash="dash", line_color="#888888", annotation_text="limit")
    figure.update_yaxes(title_text="tokens/s", row=1, col=1, rangemode="tozero")
    figure.update_yaxes(visible=False, row=2, col=1)
    figure.update_xaxes(title_text="peak memory, GiB", row=2, col=1)
    return laid_out(figure, height=460)


def _learns_the_same(row: CandidateRow, answer: AnswerDocument) -> bool:
    return all(row.knobs.get(name) == wanted for name, wanted in answer.learning.items())


def _points(
    figure: Figure, rows: Sequence[CandidateRow], names: Sequence[str], label: str, colour: str, symbol: str, strip: int
) -> None:
    from plotly.graph_objects import Scatter

    known = [row for row in rows if row.peak_memory_bytes is not None]
    if not known:
        return
    hover = []
    for row in known:
        speed = f"{rate(row.rate)} tokens/s, " if row.rate is not None else ""
        settings = escape(named(row.knobs, names)).replace(", ", "<br>")
        hover.append(f"{settings}<br>{speed}{gib(row.peak_memory_bytes)} GiB<br>{escape(row.outcome or row.basis)}")
    figure.add_trace(
        Scatter(
            x=[(row.peak_memory_bytes or 0) / GIB for row in known],
            y=[row.rate if strip == 1 else 0 for row in known],
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
    for row in sorted(rows, key=lambda one: (one.peak_memory_bytes or 0, -(one.rate or 0))):
        if not best or (row.rate or 0) > (best[-1].rate or 0):
            best.append(row)
    return best


def _frontier(figure: Figure, rows: Sequence[CandidateRow]) -> None:
    from plotly.graph_objects import Scatter

    edge = frontier([row for row in rows if row.peak_memory_bytes is not None])
    if len(edge) < 2:
        return
    line = {"color": COLOURS[0], "width": 1, "shape": "hv"}
    x, y = [(row.peak_memory_bytes or 0) / GIB for row in edge], [row.rate for row in edge]
    figure.add_trace(Scatter(x=x, y=y, mode="lines", line=line, name="frontier", hoverinfo="skip"), row=1, col=1)

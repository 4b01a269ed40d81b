"""Drawing: a figure, one sentence on how to read it, and its table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.core.answer import setting_text
from autotune.report.candidate_types import CandidateRow, RecommendationRow
from autotune.report.document_types import AnswerDocument

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

GIB = 2**30

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999933")
"""Colours for any colour vision, on white and on black (after Okabe and Ito)."""

PHASE_COLOURS = dict(
    zip(("load", "rollout", "sync", "reward", "score", "forward", "backward", "optimizer"), COLOURS, strict=True), other="#999999"
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


def absent(name: str, title: str, why: str) -> Drawing:
    """Return a drawing without data, with the reason."""
    return Drawing(id=name, title=title, says=why, figure=None)


def laid_out(figure: Figure, *, height: int, **layout: Any) -> Figure:
    """Apply the page's style: transparent for dark mode, the legend above for narrow screens."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 10, "r": 10, "t": 48, "b": 10},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "yref": "paper", "x": 0, "traceorder": "normal"},
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
    names = dict.fromkeys(name for knobs in rows for name in knobs)
    return tuple(name for name in names if len({str(knobs.get(name, "-")) for knobs in rows}) > 1)


def labelled(answer: AnswerDocument) -> Iterator[tuple[str, RecommendationRow | CandidateRow]]:
    """Yield the main candidates with their names on the page."""
    runner_ups = ((f"runner-up {number}", row) for number, row in enumerate(answer.runner_ups, start=1))
    for label, row in (("recommended", answer.recommendation), ("baseline", answer.baseline), *runner_ups):
        if row is not None:
            yield label, row


def named(knobs: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return a candidate's moving knobs as text."""
    return ", ".join(f"{name}={setting_text(knobs[name])}" for name in names if name in knobs) or "the only candidate"


def gib(size: float | None) -> str:
    return "not known" if size is None else f"{size / GIB:.2f}"


def rate(tokens: float | None) -> str:
    return "not known" if tokens is None else f"{tokens:,.0f}"

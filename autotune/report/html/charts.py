"""Parts that all charts share: drawings, colours, and the candidates' names and figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.core.space import setting_text
from autotune.report.candidate_types import CandidateRow, RecommendationRow
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

"""What a drawing is: a figure, the sentence that says how to read it, and the table behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.report.page.evidence import Evidence, Row

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

GIB = 2**30

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999933")
"""Told apart with any kind of colour vision, on white and on black (after Okabe and Ito)."""

PHASE_COLOURS = dict(
    zip(("load", "rollout", "sync", "reward", "score", "forward", "backward", "optimizer"), COLOURS, strict=True), other="#999999"
)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One figure of the page."""

    id: str
    title: str
    says: str
    """How to read it, in a sentence."""

    figure: Figure | None
    """None where there is nothing to draw; `says` then tells why."""

    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def absent(name: str, title: str, why: str) -> Drawing:
    """A figure that would be empty: the reader is told why."""
    return Drawing(id=name, title=title, says=why, figure=None)


def laid_out(figure: Figure, *, height: int, **layout: Any) -> Figure:
    """The page's own looks: no background, so that it follows the page into the dark; the legend above, for narrow screens."""
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


def moving_knobs(evidence: Evidence) -> tuple[str, ...]:
    """Knobs of which candidates have different values: by these they are named."""
    rows = [row.knobs for row in _shown(evidence)]
    names = dict.fromkeys(name for knobs in rows for name in knobs)
    return tuple(name for name in names if len({str(knobs.get(name, "-")) for knobs in rows}) > 1)


def _shown(evidence: Evidence) -> Iterable[Row]:
    yield from (*evidence.trials, *evidence.runner_ups)
    if evidence.baseline is not None:
        yield evidence.baseline
    if evidence.recommendation is not None:
        yield Row(knobs=evidence.recommendation.knobs)


def named(knobs: Mapping[str, Any], names: Sequence[str]) -> str:
    """A candidate by the knobs that move."""
    return ", ".join(f"{name}={value(knobs[name])}" for name in names if name in knobs) or "the only candidate"


def value(what: object) -> str:
    """A setting as YAML writes it."""
    if what is None:
        return "null"
    return str(what).lower() if isinstance(what, bool) else str(what)


def gib(size: float | None) -> str:
    return "not known" if size is None else f"{size / GIB:.2f}"


def rate(tokens: float | None) -> str:
    return "not known" if tokens is None else f"{tokens:,.0f}"

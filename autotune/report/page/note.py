"""The answer as optuna-dashboard takes it: a note in Markdown, and the page's figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from autotune.report.page.drawings import value
from autotune.report.page.evidence import read_evidence
from autotune.report.page.render import drawings_of, headline

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PANEL_PIXELS = 440
"""optuna-dashboard cuts off what is higher."""

MOST_RUNNER_UPS = 1
"""Of which one can still read every bar at that height; the page shows the others."""


def markdown(document: Mapping[str, Any]) -> str:
    """The recommendation, what it changes, and its settings as YAML."""
    import yaml

    evidence = read_evidence(document)
    parts = [f"**{headline(evidence)}**"]
    if evidence.changes:
        rows = [_row(change.name, value(change.baseline), value(change.recommended), change.why) for change in evidence.changes]
        parts.append("\n".join([_row("changed", "baseline", "recommended", "why"), "|---|---|---|---|", *rows]))
    if evidence.recommendation is not None:
        settings = yaml.safe_dump(dict(evidence.recommendation.knobs), sort_keys=False)
        parts.append(f"```yaml\n{settings}```")
    parts.append(f"Ended because: {evidence.proven}.")
    return "\n\n".join(parts)


def figures_of(document: Mapping[str, Any]) -> dict[str, str]:
    """plotly's JSON of every figure that has something to show, by its id, with its title inside."""
    shown, evidence = {}, read_evidence(document)
    few = msgspec.structs.replace(evidence, runner_ups=evidence.runner_ups[:MOST_RUNNER_UPS])
    for drawing in drawings_of(few):
        if drawing.figure is not None:
            shown[drawing.id] = _titled(drawing.figure, drawing.title).to_json()
    return shown


def _titled(figure: Figure, title: str) -> Figure:
    """Panels there are narrow and of one height: the title keeps the top, the legend takes lines below as it needs them."""
    below = {"yref": "container", "y": 0, "yanchor": "bottom"}
    return figure.update_layout(title={"text": title, "x": 0}, margin_t=60, legend=below, height=PANEL_PIXELS)


def _row(*cells: str) -> str:
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"

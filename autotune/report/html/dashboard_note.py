"""Answer for optuna-dashboard: a Markdown note, and the page's figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from autotune.core.answer import setting_text
from autotune.report.document_types import read_answer
from autotune.report.html.render import drawings_of, headline

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PANEL_PIXELS = 440
"""Height limit of optuna-dashboard's panels."""

MAX_RUNNER_UPS = 1
"""Runner-ups whose bars stay legible at that height; the page has the others."""


def markdown(document: Mapping[str, Any]) -> str:
    """Return the recommendation, its changes, and its settings as YAML."""
    import yaml

    answer = read_answer(document)
    parts = [f"**{headline(answer)}**"]
    if answer.changes:
        rows = [
            _row(change.name, setting_text(change.baseline), setting_text(change.recommended), change.why)
            for change in answer.changes
        ]
        parts.append("\n".join([_row("changed", "baseline", "recommended", "why"), "|---|---|---|---|", *rows]))
    if answer.recommendation is not None:
        settings = yaml.safe_dump(dict(answer.recommendation.knobs), sort_keys=False)
        parts.append(f"```yaml\n{settings}```")
    parts.append(f"Ended because: {answer.proven}.")
    return "\n\n".join(parts)


def figures_of(document: Mapping[str, Any]) -> dict[str, str]:
    """Return plotly JSON of every figure with data, by its id, with its title inside."""
    shown, answer = {}, read_answer(document)
    few = msgspec.structs.replace(answer, runner_ups=answer.runner_ups[:MAX_RUNNER_UPS])
    for drawing in drawings_of(few):
        if drawing.figure is not None:
            shown[drawing.id] = _titled(drawing.figure, drawing.title).to_json()
    return shown


def _titled(figure: Figure, title: str) -> Figure:
    """Put the title on top and the legend below, since panels are narrow and of one height."""
    below = {"yref": "container", "y": 0, "yanchor": "bottom"}
    return figure.update_layout(title={"text": title, "x": 0}, margin_t=60, legend=below, height=PANEL_PIXELS)


def _row(*cells: str) -> str:
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"

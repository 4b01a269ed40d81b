"""The answer as optuna-dashboard takes it: a note in Markdown, and the page's figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.report.page.drawings import value
from autotune.report.page.evidence import read_evidence
from autotune.report.page.render import drawings_of, headline


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
    shown = {}
    for drawing in drawings_of(read_evidence(document)):
        if drawing.figure is not None:
            titled = drawing.figure.update_layout(title={"text": drawing.title, "x": 0}, margin_t=90)
            shown[drawing.id] = titled.to_json()
    return shown


def _row(*cells: str) -> str:
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"

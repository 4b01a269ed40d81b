"""HTML page: one file without network access, rendered from the document."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autotune.core.files import read_json
from autotune.core.space import setting_text
from autotune.core.units import MIB, format_bytes, format_seconds
from autotune.report.candidate_types import IntervalRow
from autotune.report.document_types import AnswerDocument, LengthsRow, read_answer
from autotune.report.html.charts import gib, knobs_text, labelled, moving_knobs, rate
from autotune.report.html.phase_charts import memory_by_phase, search_time, seconds_by_phase
from autotune.report.html.prediction_chart import predicted_against_measured
from autotune.report.html.speed_chart import speed_against_memory
from autotune.report.html.templates import joined_files, open_templates, safe_in_script
from autotune.report.verdict_text import FITS_IN_WORDS

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PAGE = "report.html"
# Limit of a document to read; one with thousands of trials has a few megabytes
MAX_DOCUMENT_BYTES = 64 * MIB

_DRAWN = (
    speed_against_memory,
    memory_by_phase,
    seconds_by_phase,
    predicted_against_measured,
    search_time,
)


def render(document: Mapping[str, Any]) -> str:
    """Return the page. All text is escaped: a model may be named `<script>`."""
    answer = read_answer(document)
    pages = open_templates()
    pages.filters.update(
        gib=gib,
        rate=rate,
        value=setting_text,
        size=format_bytes,
        seconds=format_seconds,
    )
    drawings = []
    figures = {}
    for draw in _DRAWN:
        drawing = draw(answer)
        if drawing.figure is not None:
            drawings.append(drawing)
            figures[drawing.id] = safe_in_script(drawing.figure.to_json())
    names = moving_knobs(answer)
    return pages.get_template("page.html.jinja").render(
        answer=answer,
        drawings=drawings,
        figures=figures,
        settings=settings_yaml(answer),
        name=lambda knobs: knobs_text(knobs, names),
        names=names,
        peaks=two_peaks(answer),
        headline=headline(answer),
        failures=[row for row in answer.trials if row.outcome not in (None, "ok")],
        style=joined_files("page.css"),
        script=joined_files("page.js", "copy.js"),
    )


def settings_yaml(answer: AnswerDocument) -> str:
    """Return the recommended knobs as YAML, ready to be copied; empty without a recommendation."""
    import yaml

    if answer.recommendation is None:
        return ""
    knobs = {}
    for name, value in answer.recommendation.knobs.items():
        if value is not None:
            knobs[name] = value
    text: str = yaml.safe_dump(knobs, sort_keys=False)
    return text


def headline(answer: AnswerDocument) -> str:
    """Return the answer in one sentence."""
    best = answer.recommendation
    limit = format_bytes(answer.question.memory_limit_bytes)
    if best is None:
        return _without_recommendation(answer, limit)
    word = answer.basis.capitalize()
    warning = "" if answer.busy_machine is None else f"{answer.busy_machine} "
    speed = best.tokens_per_second.typical or best.tokens_per_second.worst
    fast = "a speed that is not known"
    peak = "an unknown peak"
    if speed is not None:
        fast = f"{speed:,.0f} tokens/s"
    if best.peak_memory_bytes is not None:
        peak = format_bytes(best.peak_memory_bytes)
    figures = f"{word}: {fast} at a peak of {peak}, of {limit} allowed"
    return f"{warning}{figures}{_against(answer, speed)}."


def _without_recommendation(answer: AnswerDocument, limit: str) -> str:
    match answer.status:
        case "undecided" if answer.predicted:
            return f"Can't be decided: no candidate surely fits into {limit}."
        case "undecided":
            return "Can't be decided: no probe ended in time."
        case "failed":
            return "Every probe failed, and none for lack of memory."
        case "interrupted":
            return "Interrupted before anything was found that fits."
    return f"Nothing fits into {limit}."


def _against(answer: AnswerDocument, speed: float | None) -> str:
    """Compare with the baseline, if both learn the same."""
    base = answer.baseline
    if base is None or speed is None:
        return ""
    if answer.recommendation and answer.recommendation.knobs == base.knobs:
        return ". It is the baseline"
    if base.fits is False or (base.outcome is not None and base.outcome != "ok"):
        if base.outcome is None or base.outcome.startswith("oom_"):
            return "; the baseline does not fit"
        return f"; the baseline ended in {base.outcome}"
    if not base.rate or (answer.recommendation and answer.recommendation.changed_learning_knobs):
        return ""
    if answer.advantage is not None and answer.advantage.why != "measurably faster":
        return f". {answer.advantage.says.rstrip('.')}"
    return f", {speed / base.rate:.2f} times the baseline's speed"


def read_document(source: Path) -> dict[str, Any]:
    """Return the JSON object in this file."""
    way_out = "Name the folder that `autotune run` wrote, or its recommendation.json."
    return read_json(source, dict[str, Any], largest_bytes=MAX_DOCUMENT_BYTES, way_out=way_out)


PANEL_PIXELS = 440  # height limit of optuna-dashboard's panels


def markdown(document: Mapping[str, Any]) -> str:
    """Return the recommendation, its changes, and its settings as YAML."""
    answer = read_answer(document)
    parts = [f"**{headline(answer)}**"]
    if answer.changes:
        rows = [_row("changed", "baseline", "recommended", "why"), "|---|---|---|---|"]
        for change in answer.changes:
            before = setting_text(change.baseline)
            after = setting_text(change.recommended)
            rows.append(_row(change.name, before, after, change.why))
        parts.append("\n".join(rows))
    if answer.recommendation is not None:
        parts.append(f"```yaml\n{settings_yaml(answer)}```")
    parts.append(f"Ended because: {answer.proven}.")
    return "\n\n".join(parts)


def figures_of(document: Mapping[str, Any]) -> dict[str, str]:
    """Return plotly JSON of every figure with data, by its id, with its title inside."""
    shown = {}
    answer = read_answer(document)
    few = msgspec.structs.replace(
        answer, runner_ups=answer.runner_ups[:1]
    )  # whose bars stay legible at that height
    # The title on top and the legend below, since panels are narrow and of one height.
    below = {"yref": "container", "y": 0, "yanchor": "bottom"}
    for draw in _DRAWN:
        drawing = draw(few)
        if drawing.figure is not None:
            title = {"text": drawing.title, "x": 0}
            drawing.figure.update_layout(
                title=title,
                margin_t=60,
                legend=below,
                height=PANEL_PIXELS,
            )
            _shorten_names(drawing.figure)
            shown[drawing.id] = drawing.figure.to_json()
    return shown


def _shorten_names(figure: Figure) -> None:
    """Leave candidates the names "baseline" and "runner-up 1": a panel has no room for settings."""
    for points in figure.data:
        has_names = len(points.y) == 2 and isinstance(points.y[0], list | tuple)
        if not has_names:
            continue
        names, phases = points.y
        shortened = []
        for name in names:
            label, _, _ = name.partition(": ")
            shortened.append(label)
        points.y = [shortened, list(phases)]


def _row(*cells: str) -> str:
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def two_peaks(answer: AnswerDocument) -> dict[str, Any] | None:
    """Return the rows of the table, and the lengths that they are for; None without given
    lengths.
    """
    names = moving_knobs(answer)
    rows = []
    for label, row in (
        *labelled(answer),
        ("fit undecided", answer.undecided),
        ("nearest miss", answer.nearest_miss),
    ):
        if row is None or row.prediction is None:
            continue
        predicted = row.prediction
        if predicted.peak_memory_bytes_at_lengths is not None:
            at_longest = _peak(predicted.peak_memory_bytes, predicted.fits)
            at_lengths = _peak(predicted.peak_memory_bytes_at_lengths, predicted.fits_at_lengths)
            says = knobs_text(row.knobs, names)
            rows.append(
                {"label": label, "says": says, "at_longest": at_longest, "at_lengths": at_lengths}
            )
    if not rows:
        return None
    sources = []
    if answer.question.completion_lengths is not None:
        sources.append(f"completions {_in_words(answer.question.completion_lengths)}")
    if answer.question.prompt_lengths is not None:
        sources.append(f"prompts {_in_words(answer.question.prompt_lengths)}")
    return {"lengths": "; ".join(sources), "rows": rows}


def _peak(peak: IntervalRow | None, fits: bool | None) -> str:
    if peak is None:
        return "not predicted"
    return (
        f"{FITS_IN_WORDS[fits]}: {format_bytes(peak.value)} ({format_bytes(peak.low)} to"
        f" {format_bytes(peak.high)})"
    )


def _in_words(lengths: LengthsRow) -> str:
    mean = "unknown"
    longest = ""
    if lengths.mean is not None:
        mean = f"{lengths.mean:,.0f}"
    if lengths.p95 is not None:
        longest = f", 95% up to {lengths.p95:,}"
    return f"of {mean} tokens on average{longest} ({lengths.source})"

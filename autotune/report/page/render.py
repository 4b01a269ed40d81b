"""The page itself: one HTML file that needs no network, from the document alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.report.page.drawings import Drawing, gib, moving_knobs, named, rate, value
from autotune.report.page.evidence import Evidence, read_evidence
from autotune.report.page.foresights import predicted_against_measured
from autotune.report.page.memories import memory_by_phase
from autotune.report.page.speeds import speed_against_memory
from autotune.report.page.times import search_time, seconds_by_phase
from autotune.units import format_bytes, format_seconds

PAGE = "report.html"
_HERE = Path(__file__).parent
_DRAWN = (speed_against_memory, memory_by_phase, seconds_by_phase, predicted_against_measured, search_time)


def render(document: Mapping[str, Any]) -> str:
    """The whole page. Everything that the document says is escaped: a model may be called `<script>`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    evidence = read_evidence(document)
    pages = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters.update(gib=gib, rate=rate, value=value, size=format_bytes, seconds=format_seconds)
    drawings = drawings_of(evidence)
    names = moving_knobs(evidence)
    return pages.get_template("page.html.jinja").render(
        evidence=evidence,
        drawings=drawings,
        figures={drawing.id: _figure(drawing) for drawing in drawings if drawing.figure is not None},
        name=lambda knobs: named(knobs, names),
        names=names,
        headline=headline(evidence),
        failures=[row for row in evidence.trials if row.outcome not in (None, "ok")],
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        script=(_HERE / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
    )


def drawings_of(evidence: Evidence) -> list[Drawing]:
    """Every figure, in the page's order."""
    return [draw(evidence) for draw in _DRAWN]


def _figure(drawing: Drawing) -> str:
    """JSON that can stand inside a script element, whatever names are in it."""
    text: str = drawing.figure.to_json() if drawing.figure is not None else "null"
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def headline(evidence: Evidence) -> str:
    """The answer in a sentence."""
    best, limit = evidence.recommendation, format_bytes(evidence.question.memory_limit_bytes)
    if best is None:
        return {
            "undecided": "Can't be decided: "
            + (f"no candidate surely fits into {limit}." if evidence.predicted else "no probe came to an answer in time."),
            "failed": "Nothing ran to its end, and not for lack of memory.",
            "interrupted": "Interrupted before anything was found that fits.",
        }.get(evidence.status, f"Nothing fits into {limit}.")
    word = "Predicted" if evidence.predicted else "Measured"
    speed = best.tokens_per_second.typical or best.tokens_per_second.worst
    fast = f"{speed:,.0f} tokens/s" if speed is not None else "a speed that is not known"
    peak = format_bytes(best.peak_memory_bytes) if best.peak_memory_bytes is not None else "an unknown peak"
    return f"{word}: {fast} at a peak of {peak}, of {limit} allowed{_against(evidence, speed)}."


def _against(evidence: Evidence, speed: float | None) -> str:
    """Compared with the baseline, where that is a fair comparison."""
    base = evidence.baseline
    if base is None or speed is None:
        return ""
    if base.fits is False or (base.outcome is not None and base.outcome != "ok"):
        return (
            "; the baseline does not fit"
            if base.out_of_memory or base.outcome is None
            else f"; the baseline ended in {base.outcome}"
        )
    if not base.rate or (evidence.recommendation and evidence.recommendation.changed_learning_knobs):
        return ""
    return f", {speed / base.rate:.2f} times the baseline's speed"

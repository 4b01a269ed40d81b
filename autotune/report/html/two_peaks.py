"""Table of predicted peaks at the longest rows and at the lengths given."""

from __future__ import annotations

from typing import Any

from autotune.core.units import format_bytes
from autotune.report.candidate_rows import FITS_IN_WORDS
from autotune.report.candidate_types import IntervalRow
from autotune.report.document_types import AnswerDocument, LengthsRow
from autotune.report.html.charts import labelled, moving_knobs, named


def two_peaks(answer: AnswerDocument) -> dict[str, Any] | None:
    """Return the rows of the table, and the lengths that they are for; None without given lengths."""
    names, rows = moving_knobs(answer), []
    for label, row in (*labelled(answer), ("fit undecided", answer.undecided), ("nearest miss", answer.nearest_miss)):
        predicted = row.prediction if row is not None else None
        if row is not None and predicted is not None and predicted.peak_memory_bytes_at_lengths is not None:
            at_longest = _peak(predicted.peak_memory_bytes, predicted.fits)
            at_lengths = _peak(predicted.peak_memory_bytes_at_lengths, predicted.fits_at_lengths)
            says = named(row.knobs, names)
            rows.append({"label": label, "says": says, "at_longest": at_longest, "at_lengths": at_lengths})
    given = (("completions", answer.question.completion_lengths), ("prompts", answer.question.prompt_lengths))
    lengths = "; ".join(f"{what} {_in_words(lengths)}" for what, lengths in given if lengths is not None)
    return {"lengths": lengths, "rows": rows} if rows else None


def _peak(peak: IntervalRow | None, fits: bool | None) -> str:
    if peak is None:
        return "not predicted"
    return f"{FITS_IN_WORDS[fits]}: {format_bytes(peak.value)} ({format_bytes(peak.low)} to {format_bytes(peak.high)})"


def _in_words(lengths: LengthsRow) -> str:
    mean = "unknown" if lengths.mean is None else f"{lengths.mean:,.0f}"
    longest = "" if lengths.p95 is None else f", 95% up to {lengths.p95:,}"
    return f"of {mean} tokens on average{longest} ({lengths.source})"

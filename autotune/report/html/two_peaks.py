"""Table of predicted peaks at the longest rows and at the lengths given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autotune.core.units import format_bytes
from autotune.report.candidate_rows import FITS_IN_WORDS
from autotune.report.candidate_types import IntervalRow, PredictionRow
from autotune.report.document_types import AnswerDocument, LengthsRow
from autotune.report.html.charts import moving_knobs, named


@dataclass(frozen=True, kw_only=True)
class CandidatePeaks:
    """Both peaks of one candidate, in words."""

    label: str
    says: str
    at_longest: str
    at_lengths: str


@dataclass(frozen=True, kw_only=True)
class TwoPeaks:
    """Rows of the table, and the lengths that they are for."""

    lengths: str
    rows: tuple[CandidatePeaks, ...]


def two_peaks(answer: AnswerDocument) -> TwoPeaks | None:
    """Return the table; None without given lengths."""
    names = moving_knobs(answer)
    rows = tuple(
        CandidatePeaks(
            label=label,
            says=named(knobs, names),
            at_longest=_peak(predicted.peak_memory_bytes, predicted.fits),
            at_lengths=_peak(predicted.peak_memory_bytes_at_lengths, predicted.fits_at_lengths),
        )
        for label, knobs, predicted in _candidates(answer)
        if predicted is not None and predicted.peak_memory_bytes_at_lengths is not None
    )
    return TwoPeaks(lengths=_lengths(answer), rows=rows) if rows else None


def _candidates(answer: AnswerDocument) -> Iterator[tuple[str, Any, PredictionRow | None]]:
    if answer.recommendation is not None:
        yield "recommended", answer.recommendation.knobs, answer.recommendation.prediction
    others = [
        ("baseline", answer.baseline),
        *((f"runner-up {number}", row) for number, row in enumerate(answer.runner_ups, start=1)),
        ("fit undecided", answer.undecided),
        ("nearest miss", answer.nearest_miss),
    ]
    for label, row in others:
        if row is not None:
            yield label, row.knobs, row.prediction


def _peak(peak: IntervalRow | None, fits: bool | None) -> str:
    if peak is None:
        return "not predicted"
    return f"{FITS_IN_WORDS[fits]}: {format_bytes(peak.value)} ({format_bytes(peak.low)} to {format_bytes(peak.high)})"


def _lengths(answer: AnswerDocument) -> str:
    given = (("completions", answer.question.completion_lengths), ("prompts", answer.question.prompt_lengths))
    return "; ".join(f"{what} {_in_words(lengths)}" for what, lengths in given if lengths is not None)


def _in_words(lengths: LengthsRow) -> str:
    mean = "unknown" if lengths.mean is None else f"{lengths.mean:,.0f}"
    longest = "" if lengths.p95 is None else f", 95% up to {lengths.p95:,}"
    return f"of {mean} tokens on average{longest} ({lengths.source})"

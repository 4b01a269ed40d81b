"""Short excerpts, as people paste them: a message without its traceback, or frames without their
message.

In a log of a run, most words of a failure count only in an error line or behind a traceback,
because runs print many warnings. A person chose the few lines of an excerpt, so each of them may be
the message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from autotune.diagnosis.diagnosis import Diagnosis
from autotune.failures.classify import classify_quoted
from autotune.failures.table import ROWS, cause_of, phase_of
from autotune.failures.tracebacks import LogLine, Tracebacks, read_line

MOST_LINES = 40
MOST_CHARACTERS = 2000  # of a line that are read; a message is shorter
CUT_OFF = "(cut off)"  # stands for the exception of a traceback that ends with its frames

_QUOTE = re.compile(r"\A(?:> ?|\* )+")
_CUT_FRAME = re.compile(
    r'\A(?!.*\bFile ")(?=\S+\.py", line \d+, in )'
)  # Frame whose line was cut at its start
_NAMES_NO_PURPOSE = frozenset(row.name for row in ROWS if row.cause == "unknown_memory")
"""Rows of libraries whose caller is not the cause."""

_FUNCTION = re.compile(r"([A-Za-z_]\w*_\w+|forward|backward)(?=[(`:,\s]|\Z)")
"""Name of a function in a statement that was quoted without its file, or in a message."""

_STEP_WITHOUT_NUMBER = re.compile(
    r"""\b(?:loss|grad_norm)['"]?\s*[:=]\s*['"]?nan\b""", re.IGNORECASE
)

_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w{0,80}\.){0,12}(?:[A-Z]\w{0,80})?(?:Error|Exception)\b(?:\(\w{1,80}\))?: .*"
)
"""Exception anywhere in a line, behind whatever printed it."""


def are_steps_without_numbers(lines: Sequence[str]) -> bool:
    """Return True if each line is a step of training whose loss or gradient is no number."""
    return 0 < len(lines) <= MOST_LINES and all(_STEP_WITHOUT_NUMBER.search(line) for line in lines)


def diagnose_excerpt(excerpt: Sequence[str]) -> Diagnosis | None:
    """Return the known failure of a text of few lines, None for others."""
    if len(excerpt) > MOST_LINES:
        return None
    texts = [
        _CUT_FRAME.sub('  File "/', _QUOTE.sub("", raw)[:MOST_CHARACTERS], count=1)
        for raw in excerpt
    ]
    lines, tracebacks = [read_line(text) for text in texts], Tracebacks()
    for position, line in enumerate(lines):
        list(tracebacks.feed(line, position))
    frames = tracebacks.frames_cut_off()
    # A line that its logger marked as a warning counts where no other says more.
    loud = [line for line in lines if line.level != "lower"]
    return _named(loud, frames) or _named(lines, frames)


def _named(lines: Sequence[LogLine], frames: Sequence[str]) -> Diagnosis | None:
    exceptions = [found[0] for line in lines if (found := _EXCEPTION.search(line.text)) is not None]
    texts = [line.text.strip() for line in lines]
    whole = "\n".join(line.text for line in lines)[:MOST_CHARACTERS]
    finding = classify_quoted(
        [*exceptions, *([CUT_OFF] if frames else [])], [*texts, whole], frames
    )
    if finding is None:
        return None
    if finding.cause == "unknown_memory" and finding.row not in _NAMES_NO_PURPOSE and not frames:
        # Statements and mentioned functions, in the form of frames without a file.
        statements = [
            f"?:{found[1]} {text}"
            for text in texts
            if (found := _FUNCTION.search(text)) is not None
        ]
        finding = replace(finding, cause=cause_of(statements) or finding.cause)
    return Diagnosis(
        known=True,
        is_memory=finding.is_memory,
        cause=finding.cause,
        phase=phase_of(frames),
        rank=next((line.rank for line in lines if line.rank is not None), None),
        evidence=frames[-1] if finding.evidence == CUT_OFF else finding.evidence,
        numbers=dict(finding.numbers),
        row=finding.row,
    )

"""Short excerpts, as people paste them: a message without its traceback, or frames without their
message.

In a log of a run, most words of a failure count only in an error line or behind a traceback,
because runs print many warnings. A person chose the few lines of an excerpt, so each of them may be
the message.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Sequence
from dataclasses import replace

from autotune.diagnosis.diagnosis import Diagnosis
from autotune.failures.classify import classify_quoted
from autotune.failures.findings import Finding
from autotune.failures.log_lines import LogLine, read_line
from autotune.failures.table import (
    FAILURE_ROWS,
    LINES,
    QUOTED_ROWS,
    FailureRow,
    cause_of,
    expand,
    phase_of,
)
from autotune.failures.tracebacks import Tracebacks

MOST_LINES = 40
MOST_QUOTED = 4  # exceptions of one line
MOST_CHARACTERS = 2000  # of a line that are read; a message is shorter
CUT_OFF = "(cut off)"  # stands for the exception of a traceback that ends with its frames

_ROWS = (*FAILURE_ROWS, *QUOTED_ROWS)
_ROWS_BESIDE_A_PLACE = tuple(
    itertools.filterfalse(operator.attrgetter("without_place"), _ROWS),
)

_HARMLESS = re.compile(expand(LINES.harmless))

_ESCAPED_QUOTE = re.compile(r"\\+(['\"])")

_QUOTE = re.compile(r"\A(?:> ?|\* )+")

# Quotation marks and colons as word processors and other scripts write them.
_PLAIN_MARKS = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "：": ": "})  # noqa: RUF001

# Frame whose line was cut at its start.
_CUT_FRAME = re.compile(r'\A(?!.*\bFile ")(?=\S+\.py", line \d+, in )')

# Rows of libraries whose caller is not the cause.
_ROWS_WITHOUT_PURPOSE = frozenset(row.name for row in FAILURE_ROWS if row.cause == "unknown_memory")

# Name of a function in a statement that was quoted without its file, or in a message.
_FUNCTION = re.compile(r"([A-Za-z_]\w*_\w+|forward|backward)(?=[(`:,\s]|\Z)")

_STEP_WITHOUT_NUMBER = re.compile(
    r"""\b(?:loss|grad_norm)['"]?\s*[:=]\s*['"]?nan\b""", re.IGNORECASE
)

_STEP_WITH_NUMBER = re.compile(r"""\bgrad_norm['"]?\s*[:=]\s*['"]?\d""", re.IGNORECASE)

# Exception anywhere in a line, behind whatever printed it.
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w{0,80}\.){0,12}(?:[A-Z]\w{0,80})?(?:Error|Exception)\b(?:\(\w{1,80}\))?: .*"
)


def are_steps_without_numbers(lines: Sequence[str]) -> bool:
    """Return True if each line is a step of training whose loss or gradient is no number."""
    if not 0 < len(lines) <= MOST_LINES:
        return False
    return all(_STEP_WITHOUT_NUMBER.search(line) for line in lines)


def diagnose_excerpt(excerpt: Sequence[str], *, has_place: bool = False) -> Diagnosis | None:
    """Return the known failure of a text of few lines, None for others. `has_place`: a whole
    traceback, whose place in the code decided nothing.
    """
    rows = _ROWS_BESIDE_A_PLACE if has_place else _ROWS
    if len(excerpt) > MOST_LINES:
        return None
    lines = []
    tracebacks = Tracebacks()
    for position, raw in enumerate(excerpt):
        text = _QUOTE.sub("", raw)[:MOST_CHARACTERS]
        text = _ESCAPED_QUOTE.sub(r"\1", text)  # a message inside a printed string
        text = text.translate(_PLAIN_MARKS)
        completed = _CUT_FRAME.sub('  File "/', text, count=1)
        line = read_line(completed)
        if _HARMLESS.match(line.text) is not None:
            continue
        lines.append(line)
        list(tracebacks.feed(line, position))
    lines = _without_passing_steps(lines)
    frames = tracebacks.frames_cut_off()
    # A line that its logger marked as a warning counts where no other says more.
    loud_lines = [line for line in lines if line.level != "lower"]
    loud_failure = _failure_in(loud_lines, frames, rows)
    return loud_failure or _failure_in(lines, frames, rows)


def _without_passing_steps(lines: Sequence[LogLine]) -> list[LogLine]:
    """Leave out steps whose gradient is no number, where a later step has one: scaling of losses
    begins with such steps.
    """
    last_number = 0
    for position, line in enumerate(lines):
        if _STEP_WITH_NUMBER.search(line.text) is not None:
            last_number = position
    remaining = []
    for position, line in enumerate(lines):
        is_passing = position < last_number and _STEP_WITHOUT_NUMBER.search(line.text) is not None
        if not is_passing:
            remaining.append(line)
    return remaining


def _failure_in(
    lines: Sequence[LogLine],
    frames: Sequence[str],
    rows: Sequence[FailureRow],
) -> Diagnosis | None:
    # 1. Classify exceptions first, then lines, then all lines as one text.
    exceptions = []
    for line in lines:
        exceptions += _exceptions_of(line.text)
    if frames:
        exceptions.append(CUT_OFF)
    texts = [line.text.strip() for line in lines]
    printed = "\n".join(line.text for line in lines)
    quoted = [*texts, printed[:MOST_CHARACTERS], *_unwrapped(lines)]
    finding = classify_quoted(exceptions, quoted, frames, rows)
    if finding is None:
        return None

    # 2. Memory without a purpose: look for one in the functions that are mentioned.
    if not frames:
        finding = _with_purpose(finding, texts)

    ranks = [line.rank for line in lines if line.rank is not None]
    evidence = finding.evidence
    if evidence == CUT_OFF:
        evidence = frames[-1]
    return Diagnosis(
        known=True,
        is_memory=finding.is_memory,
        cause=finding.cause,
        phase=phase_of(frames),
        rank=ranks[0] if ranks else None,
        evidence=evidence,
        numbers=dict(finding.numbers),
        row=finding.row,
    )


def _exceptions_of(text: str) -> list[str]:
    """Return the exceptions of a line: one may quote another behind its own class."""
    exceptions: list[str] = []
    exception = _EXCEPTION.search(text)
    while exception is not None and len(exceptions) < MOST_QUOTED:
        exceptions.append(exception[0])
        _, _, text = exception[0].partition(": ")
        exception = _EXCEPTION.search(text)
    return exceptions


def _unwrapped(lines: Sequence[LogLine]) -> list[str]:
    """Return the text without the line ends that a terminal put between words, or into one."""
    if len(lines) < 2:
        return []
    texts = [line.text for line in lines]
    between_words = " ".join(map(str.strip, texts))
    into_a_word = "".join(texts)
    return [between_words[:MOST_CHARACTERS], into_a_word[:MOST_CHARACTERS]]


def _with_purpose(finding: Finding, texts: Sequence[str]) -> Finding:
    """Return the finding with the cause that statements and mentioned functions show."""
    has_no_purpose = finding.row in _ROWS_WITHOUT_PURPOSE
    if finding.cause != "unknown_memory" or has_no_purpose:
        return finding
    statements = []
    for text in texts:
        function = _FUNCTION.search(text)
        if function is not None:
            # The form of a frame without a file.
            statements.append(f"?:{function[1]} {text}")
    cause = cause_of(statements) or finding.cause
    return replace(finding, cause=cause)

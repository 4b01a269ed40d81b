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
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autotune.diagnosis.diagnosis import Diagnosis
from autotune.diagnosis.excerpt_lines import (
    MOST_CHARACTERS,
    excerpt_lines,
    is_step_without_number,
)
from autotune.failures.classify import classify_quoted
from autotune.failures.findings import Finding
from autotune.failures.log_lines import LogLine
from autotune.failures.table import (
    FAILURE_ROWS,
    QUOTED_ROWS,
    FailureRow,
    cause_of,
    phase_of,
)
from autotune.failures.tracebacks import Tracebacks

MOST_LINES = 40
MOST_QUOTED = 4  # exceptions of one line
CUT_OFF = "(cut off)"  # stands for the exception of a traceback that ends with its frames

_ROWS = (*FAILURE_ROWS, *QUOTED_ROWS)
_ROWS_BESIDE_A_PLACE = tuple(
    itertools.filterfalse(operator.attrgetter("without_place"), _ROWS),
)

# Phases in which alone a row's text is printed.
_PHASE_OF_ROW = {row.name: row.phase for row in _ROWS}

# Causes that a run which goes on warns of as well: a part that is missing is done without.
_CAUSES_OF_REMARKS = ("illegal_config", "version", "data", "disk_or_permission")


def _is_read_in_any_line(row: FailureRow) -> bool:
    return row.read_in == "any line"


def _counts_in_warnings(row: FailureRow) -> bool:
    if row.cause in _CAUSES_OF_REMARKS:
        return _is_read_in_any_line(row)
    return True


_ROWS_OF_INFOS = tuple(filter(_is_read_in_any_line, _ROWS))
_ROWS_OF_WARNINGS = tuple(filter(_counts_in_warnings, _ROWS))


def is_of_remarks(row_name: str | None) -> bool:
    """Return True for a row whose words alone may be a warning of a run that goes on."""
    for row in FAILURE_ROWS:
        if row.name == row_name:
            return _is_read_in_any_line(row) and row.cause in _CAUSES_OF_REMARKS
    return False


# Rows of libraries whose caller is not the cause.
_ROWS_WITHOUT_PURPOSE = frozenset(row.name for row in FAILURE_ROWS if row.cause == "unknown_memory")

# Name of a function in a statement that was quoted without its file, or in a message.
_FUNCTION = re.compile(r"([A-Za-z_]\w*_\w+|forward|backward)(?=[(`:,\s]|\Z)")

# Exception anywhere in a line, behind whatever printed it.
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w{0,80}\.){0,12}(?:[A-Z]\w{0,80})?(?:Error|Exception)\b(?:\(\w{1,80}\))?: .*"
)

_WITHOUT_MESSAGE = re.compile(r"\s*(?:[A-Za-z_]\w*\.){0,12}[A-Z]\w*(?:Error|Exception):\s*\Z")


def are_steps_without_numbers(lines: Sequence[str]) -> bool:
    """Return True if each line is a step of training whose loss or gradient is no number."""
    if not 0 < len(lines) <= MOST_LINES:
        return False
    return all(map(is_step_without_number, lines))


def diagnose_excerpt(excerpt: Sequence[str], *, has_place: bool = False) -> Diagnosis | None:
    """Return the known failure of a text of few lines, None for others. `has_place`: a whole
    traceback, whose place in the code decided nothing.
    """
    rows = _ROWS_BESIDE_A_PLACE if has_place else _ROWS
    if len(excerpt) > MOST_LINES:
        return None
    lines = excerpt_lines(excerpt)
    tracebacks = Tracebacks()
    for position, line in enumerate(lines.all):
        list(tracebacks.feed(line, position))
    frames = tracebacks.frames_cut_off()
    # A line that its logger marked as a remark counts where no other says more.
    return (
        _failure_in(lines.loud, frames, rows)
        or _failure_in(lines.warnings, (), _ROWS_OF_WARNINGS)
        or _failure_in(lines.infos, (), _ROWS_OF_INFOS)
    )


def _failure_in(
    lines: Sequence[LogLine],
    frames: Sequence[str],
    rows: Sequence[FailureRow],
) -> Diagnosis | None:
    # 1. Classify exceptions first, then lines, then all lines as one text.
    exceptions = []
    for text in _with_their_messages(lines):
        exceptions += _exceptions_of(text)
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
        phase=phase_of(frames) or _PHASE_OF_ROW.get(finding.row or ""),
        rank=ranks[0] if ranks else None,
        evidence=evidence,
        numbers=dict(finding.numbers),
        row=finding.row,
    )


def _with_their_messages(lines: Sequence[LogLine]) -> Iterator[str]:
    """Yield each line's text; a message of several lines begins behind the line of its class."""
    class_alone = ""
    for line in lines:
        text = line.text
        if class_alone:
            text = f"{class_alone} {text.strip()}"
        yield text
        class_alone = ""
        if _WITHOUT_MESSAGE.match(line.text):
            class_alone = line.text.strip()


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

"""Diagnosis of a training log: the first failure, and its remedies.

log_files.py    file or stream -> lines
log_reader.py   lines -> exceptions, known messages and echoes -> the decisive failure
    failure_candidates.py   exceptions and messages, with their weight as evidence
    log_endings.py          endings without a failure message
    gpu_neighbours.py       the processes that held the memory of the failing GPU
    host_memory_users.py    those that held host memory
excerpt.py      short texts without a whole traceback: every line may be the message
remedies.py     remedies, with their predicted effect
    log_framework.py   the framework that a log names, and remedies under its own names
diagnosis.py    the result, as JSON and as text
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable

from autotune.diagnosis.diagnosis import SCHEMA, Advice, Diagnosis, as_document
from autotune.diagnosis.excerpt import (
    MOST_LINES,
    are_steps_without_numbers,
    diagnose_excerpt,
    is_of_remarks,
)
from autotune.diagnosis.log_framework import LogFramework
from autotune.diagnosis.log_reader import LogReader
from autotune.diagnosis.remedies import advice_for

__all__ = ["SCHEMA", "Advice", "Diagnosis", "as_document", "diagnose", "diagnose_lines"]

# Lines whose words are looked up together: most words of failures are in none of them.
BLOCK_LINES = 128


def diagnose(text: str) -> Diagnosis:
    """Return the first failure in a whole log."""
    return diagnose_lines(re.split(r"\r\n|\n|\r", text))


def diagnose_lines(lines: Iterable[str]) -> Diagnosis:
    """Return the first failure in a log that is read line by line."""
    # 1. Read the log once, block by block.
    reader = LogReader()
    framework = LogFramework()
    first_lines: list[str] = []
    numbered = enumerate(lines)
    while block := list(itertools.islice(numbered, BLOCK_LINES)):
        raw_lines = [raw for _, raw in block]
        lowered = "\n".join(raw_lines).lower()
        framework.feed(lowered)
        reader.feed(block, lowered)
        if len(first_lines) <= MOST_LINES:
            first_lines += [raw for raw in raw_lines if raw.strip()]

    # 2. Prefer the reading as an excerpt where the log itself says less.
    diagnosis = reader.conclude()
    if are_steps_without_numbers(first_lines) or not reader.is_of_a_run:
        of_excerpt = diagnose_excerpt(first_lines)
        is_short = len(first_lines) <= MOST_LINES
        if is_short and of_excerpt is None and is_of_remarks(diagnosis.row):
            # The line was left out of the excerpt as a remark.
            diagnosis = dataclasses.replace(diagnosis, known=False, cause=None, row=None)
        diagnosis = _more_exact(diagnosis, of_excerpt)
    elif len(first_lines) <= MOST_LINES:
        of_excerpt = diagnose_excerpt(reader.quoted_exception, has_place=True)
        diagnosis = _more_exact(diagnosis, of_excerpt)

    # 3. Add the remedies in the framework's own names.
    remedies = advice_for(diagnosis, framework)
    return dataclasses.replace(diagnosis, framework=framework.name, remedies=remedies)


def _more_exact(diagnosis: Diagnosis, of_excerpt: Diagnosis | None) -> Diagnosis:
    """Return the excerpt's reading where the log has no cause, or memory without its purpose."""
    if of_excerpt is None:
        return diagnosis
    if not diagnosis.known:
        return of_excerpt
    if of_excerpt.is_memory and diagnosis.cause == "unknown_memory":
        return dataclasses.replace(diagnosis, cause=of_excerpt.cause)
    return diagnosis

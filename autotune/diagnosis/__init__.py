"""Diagnosis of a training log: the first failure, and its remedies.

log_files.py    file or stream -> lines
log_reader.py   lines -> exceptions, known messages and echoes -> the decisive failure
    log_facts.py    endings without a failure message, and the processes that held the memory
excerpt.py      short texts without a whole traceback: every line may be the message
remedies.py     remedies under the framework's own names, as values of a configuration, with their predicted effect
diagnosis.py    the result, as JSON and as text
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable

from autotune.diagnosis.diagnosis import SCHEMA, Advice, Diagnosis, as_document
from autotune.diagnosis.excerpt import MOST_LINES, are_steps_without_numbers, diagnose_excerpt
from autotune.diagnosis.log_reader import LogReader
from autotune.diagnosis.remedies import LogFramework, advice_for

__all__ = ["SCHEMA", "Advice", "Diagnosis", "as_document", "diagnose", "diagnose_lines"]


LINES_AT_ONCE = (
    128  # lines whose words are looked up together: most words of failures are in none of them
)


def diagnose(text: str) -> Diagnosis:
    """Return the first failure in a whole log."""
    return diagnose_lines(re.split(r"\r\n|\n|\r", text))


def diagnose_lines(lines: Iterable[str]) -> Diagnosis:
    """Return the first failure in a log that is read line by line."""
    reader, framework, first = LogReader(), LogFramework(), list[str]()
    numbered = enumerate(lines)
    while block := list(itertools.islice(numbered, LINES_AT_ONCE)):
        lowered = "\n".join(raw for _, raw in block).lower()
        framework.feed(lowered)
        reader.feed(block, lowered)
        if len(first) <= MOST_LINES:
            first += [raw for _, raw in block if raw.strip()]
    found = reader.conclude()
    if are_steps_without_numbers(first) or not reader.is_of_a_run:
        quoted = diagnose_excerpt(
            first
        )  # more exact where the log itself names no cause, or memory without its purpose
        if quoted is not None and not found.known:
            found = quoted
        elif quoted is not None and quoted.is_memory and found.cause == "unknown_memory":
            found = dataclasses.replace(found, cause=quoted.cause)
    return dataclasses.replace(
        found, framework=framework.name, remedies=advice_for(found, framework)
    )

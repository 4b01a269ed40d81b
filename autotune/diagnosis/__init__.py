"""Diagnosis of a training log: the first failure, and its remedies.

log_reader.py      lines -> exceptions, known messages and echoes -> the decisive failure
    log_endings.py     logs without a failure message: finished, not a number, gave up
    excerpt.py         short texts without a whole traceback: every line may be the message
    host_memory_users.py  victim and largest holder where host memory ran out
    gpu_neighbours.py  other processes on the failing GPU
    diagnosis.py       the result and its JSON
    log_framework.py   the framework of the log, and its names for the remedies
    advice_table.py    remedies from the failure table
    remedy_changes.py  remedies as values of one configuration
    remedy_effects.py  predicted effect of each remedy
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable

from autotune.diagnosis.advice_table import advice_for
from autotune.diagnosis.diagnosis import SCHEMA, Advice, Diagnosis, as_document
from autotune.diagnosis.excerpt import Excerpt
from autotune.diagnosis.log_framework import LogFramework
from autotune.diagnosis.log_reader import LogReader

__all__ = ["SCHEMA", "Advice", "Diagnosis", "as_document", "diagnose", "diagnose_lines"]


LINES_AT_ONCE = 128
"""Lines whose words are looked up together: most words of failures are in none of them."""


def diagnose(text: str) -> Diagnosis:
    """Return the first failure in a whole log."""
    return diagnose_lines(re.split(r"\r\n|\n|\r", text))


def diagnose_lines(lines: Iterable[str]) -> Diagnosis:
    """Return the first failure in a log that is read line by line."""
    reader, excerpt, framework = LogReader(), Excerpt(), LogFramework()
    numbered = enumerate(lines)
    while block := list(itertools.islice(numbered, LINES_AT_ONCE)):
        text = "\n".join(raw for _, raw in block).lower()
        reader.expect(text)
        framework.feed(text)
        for position, raw in block:
            reader.feed(raw, position)
            excerpt.feed(raw)
    found = reader.conclude()
    if excerpt.is_of_steps_without_numbers or not reader.is_of_a_run:
        found = _more_exact(found, excerpt.diagnosis())
    return dataclasses.replace(found, framework=framework.name, remedies=advice_for(found, framework))


def _more_exact(found: Diagnosis, quoted: Diagnosis | None) -> Diagnosis:
    """Return the reading as an excerpt where the log itself names no cause, or memory without its purpose."""
    if quoted is None or not found.known:
        return quoted or found
    purpose = quoted.is_memory and found.cause == "unknown_memory"
    return dataclasses.replace(found, cause=quoted.cause) if purpose else found

"""What failed first in a training log, and what helps.

reading.py     line by line: exceptions, words, echoes; what decided
ends.py        how a log ends that holds no failure of its own words
neighbours.py  who else holds memory of the failing GPU
diagnosis.py   what is said of it, and its JSON
advising.py    what helps, by the table of failures
changes.py     what that comes to in one configuration
effects.py     by how much, where the configuration is given
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from autotune.diagnose.advising import advice_for
from autotune.diagnose.diagnosis import SCHEMA, Advice, Diagnosis, as_document
from autotune.diagnose.reading import Reader

__all__ = ["SCHEMA", "Advice", "Diagnosis", "as_document", "diagnose", "diagnose_lines"]


def diagnose(text: str) -> Diagnosis:
    """What failed first in a whole log."""
    return diagnose_lines(re.split(r"\r\n|\n|\r", text))


def diagnose_lines(lines: Iterable[str]) -> Diagnosis:
    """The same for a log that is not to be held in memory."""
    reader = Reader()
    for position, raw in enumerate(lines):
        reader.feed(raw, position)
    found = reader.conclude()
    return dataclasses.replace(found, remedies=advice_for(found))

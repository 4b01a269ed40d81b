"""From the words and the exit of a failed run to its Outcome, phase, cause and numbers. The only place that reads failure text.

table.py      the closed table: one row per known text; each row has a recorded sample in the tests
frames.py     the places in a traceback: what the memory was for, and which phase it was
judge.py      an exception, or an end without one -> Finding
remedies.py   what helps, by cause
log.py, tracebacks.py   from the lines of a log, which several processes printed at once, to their exceptions
"""

from autotune.failures.frames import phase_of
from autotune.failures.judge import Ending, Finding, Raised, judge_ending, judge_raised, read_log, told_by_line
from autotune.failures.log import Line, lines_of, read_line
from autotune.failures.remedies import BY_CAUSE, BY_ROW, Remedy, remedies_for
from autotune.failures.table import CAUSES, MEMORY_CAUSES, ROWS, Row
from autotune.failures.tracebacks import Thrown, Told, Tracebacks

__all__ = [
    "BY_CAUSE",
    "BY_ROW",
    "CAUSES",
    "MEMORY_CAUSES",
    "ROWS",
    "Ending",
    "Finding",
    "Line",
    "Raised",
    "Remedy",
    "Row",
    "Thrown",
    "Told",
    "Tracebacks",
    "judge_ending",
    "judge_raised",
    "lines_of",
    "phase_of",
    "read_line",
    "read_log",
    "remedies_for",
    "told_by_line",
]

"""Classification of a failed run: message and exit status -> Outcome, phase, cause and numbers.

No other package reads the text of failures.

table.py              rows of the closed table; each row has a recorded sample in the tests
    patterns.py, tables/  the tables as YAML files, and their loader
    numbers.py            figures that a message contains
    frames.py             purpose of the memory and phase, from the frames of a traceback
    classify.py           exception or exit status -> Finding;  launched_exit.py  the same for launched programs
    remedies.py           remedies by cause, with the direction in which a setting must move
    warnings_in_log.py    warnings that cost speed although the run continues
    environment_traps.py  known conflicts of versions and settings, from traps.yaml
    log_lines.py, tracebacks.py   interleaved lines of several processes -> exceptions
"""

from autotune.failures.classify import (
    HOST_KILLED,
    Finding,
    ProcessExit,
    ReportedException,
    classify_exception,
    classify_exit,
    classify_line,
    classify_logged,
    classify_quoted,
    ended_from_outside,
    read_log,
)
from autotune.failures.environment_traps import ActiveTrap, EnvironmentFacts, active_traps, traps
from autotune.failures.frames import cause_of, phase_of
from autotune.failures.launched_exit import classify_launched
from autotune.failures.log_lines import LogLine, lines_of, read_line
from autotune.failures.numbers import NEIGHBOUR, NUMBERS, Numbers, mostly_unlisted, without_neighbours
from autotune.failures.remedies import BY_CAUSE, BY_ROW, Remedy, directions_after, remedies_for
from autotune.failures.table import CAUSES, MEMORY_CAUSES, ROWS, FailureRow
from autotune.failures.tracebacks import ExceptionChain, LoggedException, Tracebacks
from autotune.failures.warnings_in_log import KNOWN_WARNINGS, KnownWarning, warning_in

__all__ = [
    "BY_CAUSE",
    "BY_ROW",
    "CAUSES",
    "HOST_KILLED",
    "KNOWN_WARNINGS",
    "MEMORY_CAUSES",
    "NEIGHBOUR",
    "NUMBERS",
    "ROWS",
    "ActiveTrap",
    "EnvironmentFacts",
    "ExceptionChain",
    "FailureRow",
    "Finding",
    "KnownWarning",
    "LogLine",
    "LoggedException",
    "Numbers",
    "ProcessExit",
    "Remedy",
    "ReportedException",
    "Tracebacks",
    "active_traps",
    "cause_of",
    "classify_exception",
    "classify_exit",
    "classify_launched",
    "classify_line",
    "classify_logged",
    "classify_quoted",
    "directions_after",
    "ended_from_outside",
    "lines_of",
    "mostly_unlisted",
    "phase_of",
    "read_line",
    "read_log",
    "remedies_for",
    "traps",
    "warning_in",
    "without_neighbours",
]

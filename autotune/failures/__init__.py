"""From the words and the exit of a failed run to its Outcome, phase, cause and numbers. The only place that reads failure text.

table.py      what a row of the closed table is: one per known text; each row has a recorded sample in the tests
rows_of_*.py   the rows, and arguments.py the names that one of them knows; rows.py is all of them in their order
numbers.py    what a message measured itself, and what these numbers are called
frames.py     the places in a traceback: what the memory was for, and which phase it was;  places.py  their rows
judge.py      an exception, or an end without one -> Finding;  launched.py  the same of a program of the user's own
remedies.py   what helps, by cause, and with it which way a setting must move
remarks.py    what a running training says that is no failure and yet costs something
traps.py, traps.yaml   what is known to go wrong with certain versions and settings of an environment
log.py, tracebacks.py   from the lines of a log, which several processes printed at once, to their exceptions
"""

from autotune.failures.frames import phase_of
from autotune.failures.judge import Ending, Finding, Raised, judge_ending, judge_raised, judge_thrown, read_log, told_by_line
from autotune.failures.launched import judge_launched
from autotune.failures.log import Line, lines_of, read_line
from autotune.failures.numbers import NEIGHBOUR, NUMBERS, Numbers, mostly_unseen, without_neighbours
from autotune.failures.remarks import REMARKS, Remark, remarks_in
from autotune.failures.remedies import BY_CAUSE, BY_ROW, Remedy, pushes, remedies_for
from autotune.failures.rows import ROWS
from autotune.failures.table import CAUSES, MEMORY_CAUSES, Row
from autotune.failures.tracebacks import Thrown, Told, Tracebacks
from autotune.failures.traps import Sprung, Surroundings, sprung_in, traps

__all__ = [
    "BY_CAUSE",
    "BY_ROW",
    "CAUSES",
    "MEMORY_CAUSES",
    "NEIGHBOUR",
    "NUMBERS",
    "REMARKS",
    "ROWS",
    "Ending",
    "Finding",
    "Line",
    "Numbers",
    "Raised",
    "Remark",
    "Remedy",
    "Row",
    "Sprung",
    "Surroundings",
    "Thrown",
    "Told",
    "Tracebacks",
    "judge_ending",
    "judge_launched",
    "judge_raised",
    "judge_thrown",
    "lines_of",
    "mostly_unseen",
    "phase_of",
    "pushes",
    "read_line",
    "read_log",
    "remarks_in",
    "remedies_for",
    "sprung_in",
    "told_by_line",
    "traps",
    "without_neighbours",
]

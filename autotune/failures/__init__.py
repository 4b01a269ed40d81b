"""From the words and the exit of a failed run to its Outcome, phase, cause and numbers. The only place that reads failure text.

table.py      the closed table: one row per known text; each row has a recorded sample in the tests
judge.py      an exception, or an end without one -> Finding
"""

from autotune.failures.judge import Ending, Finding, Raised, judge_ending, judge_raised, read_log
from autotune.failures.table import CAUSES, MEMORY_CAUSES, ROWS, Row

__all__ = ["CAUSES", "MEMORY_CAUSES", "ROWS", "Ending", "Finding", "Raised", "Row", "judge_ending", "judge_raised", "read_log"]

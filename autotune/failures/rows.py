"""The whole table of failure texts, in its order."""

from __future__ import annotations

from autotune.failures.rows_of_checks import ROWS_OF_CHECKS
from autotune.failures.rows_of_files import ROWS_OF_FILES
from autotune.failures.rows_of_memory import ROWS_OF_MEMORY
from autotune.failures.rows_of_others import ROWS_OF_OTHERS
from autotune.failures.rows_of_refusals import ROWS_OF_REFUSALS
from autotune.failures.table import Row

ROWS: tuple[Row, ...] = (*ROWS_OF_MEMORY, *ROWS_OF_REFUSALS, *ROWS_OF_OTHERS, *ROWS_OF_CHECKS, *ROWS_OF_FILES)

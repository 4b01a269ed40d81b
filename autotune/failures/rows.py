"""The whole table of failure texts, in its order."""

from __future__ import annotations

from autotune.failures.rows_of_memory import ROWS_OF_MEMORY
from autotune.failures.rows_of_others import ROWS_OF_OTHERS
from autotune.failures.table import Row

ROWS: tuple[Row, ...] = (*ROWS_OF_MEMORY, *ROWS_OF_OTHERS)

"""A trace and the result of its replay on arrays: what both forms of the allocator share."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotune.estimate.allocator import OutOfMemory

Integers: TypeAlias = NDArray[np.int64]

NONE = -1

PEAK_REQUESTED, PEAK_ALLOCATED, PEAK_RESERVED, AT_EVENT = range(4)
"""Columns of the peaks, in bytes; AT_EVENT: event of the allocated peak."""

PEAK_COLUMNS = 4


class EventArrays(NamedTuple):
    """Events of a trace, divided into stretches (runs of events in one phase)."""

    events: Integers
    starts: Integers  # first event of each stretch, and one more entry for the end
    rows: Integers  # result row of each stretch
    emptied: Integers  # 1: the cache is emptied before this stretch
    snapshot: int  # stretch before which the resting state is noted; last + 1: the end; -1: none
    streams: Integers  # stream of each allocation
    waits: Integers  # allocation before which a freed block is usable again; -1: at once


class ReplayPeaks(NamedTuple):
    """Result of one replay."""

    peaks: Integers  # one row per result row, and the snapshot's last
    reached: Integers  # 1: the row's stretches were reached
    retries: int
    out_of_memory: OutOfMemory | None

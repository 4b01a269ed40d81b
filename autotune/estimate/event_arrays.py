"""Input and output of one replay, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

NONE = -1


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

    peaks: Integers  # per row: requested, allocated, reserved bytes, event of the second; last: snapshot
    reached: Integers  # 1: the row's stretches were reached
    counters: Integers  # see `allocator_compiled.COUNTERS`
    completed: bool  # False: out of memory


def require_sound(arrays: EventArrays, rows: int) -> None:
    """Raise IndexError for indices out of range: the compiled replay has no bounds checks."""
    count, numbers = len(arrays.streams), np.abs(arrays.events) - 1
    if (numbers < 0).any() or (numbers >= count).any() or len(arrays.waits) != count:
        raise IndexError("an event refers to no allocation")
    if len(np.unique(arrays.events)) < len(arrays.events):
        raise IndexError("an allocation is made twice or freed twice")
    if (arrays.streams < 0).any() or (arrays.waits < NONE).any():
        raise IndexError("an allocation has no stream or waits for a negative number")
    if not len(arrays.rows) == len(arrays.emptied) == len(arrays.starts) - 1:
        raise IndexError("stretches and rows differ in number")
    if (np.diff(arrays.starts, prepend=0, append=len(arrays.events)) < 0).any():
        raise IndexError("a stretch is outside the events")
    if (arrays.rows < 0).any() or (arrays.rows >= rows).any():
        raise IndexError("a stretch refers to no row")

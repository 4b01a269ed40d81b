"""What is to be replayed, as arrays: events and where they belong; and what was held while they ran."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

NONE = -1


class Course(NamedTuple):
    """Events and where they belong."""

    events: Integers
    starts: Integers
    """Of each stretch, its first event; one more entry for the end."""

    belongs: Integers
    """Of each stretch, the row that its peaks go into."""

    emptied: Integers
    """Of each stretch, whether the cache is given back before it."""

    looked: int
    """The stretch before which a look is taken at what is held, the one behind the last for the end; -1 for none."""

    streams: Integers
    """Of each allocation."""

    waits: Integers
    """Of each allocation, the one before which it is free again on its own stream; -1 where it is so at once."""


class Walked(NamedTuple):
    """What was held."""

    peaks: Integers
    """Of each row: requested, allocated and reserved bytes, and the event of the second; the last row is the look's."""

    seen: Integers
    """Whether a row's stretches were reached."""

    books: Integers
    """As they were left."""

    ran: bool
    """Whether there was room for all of it."""


def require_sound(course: Course, rows: int) -> None:
    """IndexError for what would end in somebody else's memory: the compiled walk looks at no bounds."""
    count, numbers = len(course.streams), np.abs(course.events) - 1
    if (numbers < 0).any() or (numbers >= count).any() or len(course.waits) != count:
        raise IndexError("an event makes or gives back what is no allocation")
    if len(np.unique(course.events)) < len(course.events):
        raise IndexError("an allocation is made twice, or given back twice")
    if (course.streams < 0).any() or (course.waits < NONE).any():
        raise IndexError("an allocation is on no stream, or waits for none that there is")
    if not len(course.belongs) == len(course.emptied) == len(course.starts) - 1:
        raise IndexError("not every stretch says where it belongs")
    if (np.diff(course.starts, prepend=0, append=len(course.events)) < 0).any():
        raise IndexError("a stretch lies outside of the events")
    if (course.belongs < 0).any() or (course.belongs >= rows).any():
        raise IndexError("a stretch belongs to no row")

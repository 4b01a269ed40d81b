"""Progress of long work: the place that does the work reports it, a display shows it.

    with watched_by(display):
        report(WorkProgress(done=3, expected=12, unit="trace"))

Without a display a report has no effect. Reports may come from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkProgress:
    """Finished units of the work that is known so far."""

    done: int
    expected: int
    unit: str

    def __str__(self) -> str:
        unit = self.unit if self.expected == 1 else f"{self.unit}s"
        return f"{self.done:,} of {self.expected:,} {unit}"


Watcher = Callable[[WorkProgress], None]
_watchers: list[Watcher] = []


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Send reports to this watcher."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def report(progress: WorkProgress) -> None:
    for watcher in tuple(_watchers):
        watcher(progress)

"""Reader of sources: what several variations of a request share is read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class SourceReader:
    """Remembers each reading by its function and arguments, which are hashable."""

    def __init__(self) -> None:
        self._results: dict[tuple[object, ...], Any] = {}

    def once(self, read: Callable[..., Result], *arguments: object) -> Result:
        """Return the result of the reading. An error is not remembered."""
        key = (read, *arguments)
        if key not in self._results:
            self._results[key] = read(*arguments)
        result: Result = self._results[key]
        return result

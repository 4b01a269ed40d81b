"""Steps of a run, from what it prints: the bar of the trainer, or a numbered line of a step."""

from __future__ import annotations

import re
import statistics
from collections import deque

# A bar without words is that of transformers' trainers; loading and evaluation have words, or fewer
# steps than the training.
BAR = re.compile(
    r"(?:^|[\r\n])\s*(?:(?:Train|Training StepProgress)\s*:\s*)?\d+%\|[^|\n]*\|\s*(\d+)/(\d+) \["
)
STEP = re.compile(r"\bstep:(\d+) - |['\"]global_step(?:/max_steps)?['\"]: ?['\"]?(\d+)(?:/(\d+))?")
MAX_DURATIONS = 50


class StepProgress:
    """Last step that was printed, and the usual time of one."""

    def __init__(self, now: float) -> None:
        self.step: int | None = None
        self.total: int | None = None
        self.since = now  # the time of the last new step
        self._durations: deque[float] = deque(maxlen=MAX_DURATIONS)

    def feed(self, text: str, now: float) -> bool:
        """Read newly printed text; return True for a new step."""
        for step, total in _steps_in(text):
            if total is not None:
                if self.total is not None and total < self.total:
                    continue
                self.total = total
            if self.step is None or step > self.step:
                return self._advance(step, now)
        return False

    def reached(self, step: int, now: float) -> bool:
        """Note a step that a checkpoint shows."""
        return (self.step is None or step > self.step) and self._advance(step, now)

    def _advance(self, step: int, now: float) -> bool:
        if self.step is not None and step > self.step:
            self._durations.append((now - self.since) / (step - self.step))
        self.step = step
        self.since = now
        return True

    @property
    def usual_seconds(self) -> float | None:
        """Return the median time of a step; None before three are known."""
        if len(self._durations) < 3:
            return None
        return statistics.median(self._durations)


def _steps_in(text: str) -> list[tuple[int, int | None]]:
    """Return the steps with their totals, the newest first."""
    available: list[tuple[int, int, int | None]] = []
    for match in BAR.finditer(text):
        available.append((match.start(), int(match[1]), int(match[2])))
    for match in STEP.finditer(text):
        total = None if match[3] is None else int(match[3])
        available.append((match.start(), int(match[1] or match[2]), total))
    available.sort(key=lambda place: -place[0])
    return [(step, total) for _, step, total in available]

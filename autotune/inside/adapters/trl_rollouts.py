"""Rollouts taken over: what was generated for one candidate serves the next ones that generate the same batch.

While the generation batch and the engine stay, micro-batch, accumulation and checkpointing change nothing in generation. So a
further candidate only trains: on completions that an earlier one has generated, with the seconds that this took there. What is
taken over is said, and never certified by: the longer probe of a finalist generates for itself.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

NOT_IN_GENERATION = frozenset({
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_empty_cache_steps",
})  # fmt: skip
"""Settings that move nothing in a rollout: only the rows of a whole generation batch do."""

TAKEN_OVER = ("rollout", "sync")
"""The phases that one turn of generation goes through."""

MOST_KEPT = 8
"""So many generation batches are remembered; each is a few megabytes of token ids."""


@dataclass(frozen=True)
class Kept:
    """One generation batch, and what it took."""

    answer: Any
    """What TRL's own method returned: token ids, and their log-probabilities where an engine gave them."""

    seconds: Mapping[str, float]
    """By phase: the median over the turns after the first."""

    peak_bytes: Mapping[str, int]
    """By phase: the process's peak meanwhile."""


class Library:
    """What one rank has generated since it loaded, the newest batches."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def get(self, key: str) -> Kept | None:
        return self._kept.get(key)

    def put(self, key: str, kept: Kept) -> None:
        self._kept.pop(key, None)
        self._kept[key] = kept
        while len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]


def key_of(settings: Mapping[str, Any], *, rows: int, prompt: int | None, completion: int, typical: bool, seed: int) -> str:
    """Equal keys, equal rollouts."""
    telling = {name: str(value) for name, value in sorted(settings.items()) if name not in NOT_IN_GENERATION}
    return json.dumps([telling, rows, prompt, completion, typical, seed])


@dataclass
class Rollouts:
    """The turns of one run."""

    stage: Any
    source: Kept | None = None
    """Where to take rollouts from; None runs them all."""

    real_first: int = 0
    """So many turns are run in any case, for what they leave behind in an allocator that keeps its blocks."""

    run: int = 0
    borrowed: int = 0
    borrowed_seconds: dict[str, float] = field(default_factory=dict)
    _turns: list[dict[str, float]] = field(default_factory=list)
    _first: Any = None

    def turn(self, generate: Callable[[], Any]) -> Any:
        """One turn of generation: run, or taken over."""
        if self.source is not None and self.run >= self.real_first:
            return self._take_over(self.source)
        before = self.stage.seconds()
        answer = generate()
        after = self.stage.seconds()
        self._turns.append({phase: after[phase] - before[phase] for phase in TAKEN_OVER})
        self._first = answer if self.run == 0 else self._first
        self.run += 1
        return answer

    def _take_over(self, source: Kept) -> Any:
        self.borrowed += 1
        for phase, seconds in source.seconds.items():
            self.borrowed_seconds[phase] = self.borrowed_seconds.get(phase, 0.0) + seconds
        return source.answer

    def kept(self, phase_peak_bytes: Mapping[str, int]) -> Kept | None:
        """What later candidates may take over; None where too little was run to know its seconds."""
        if self.source is not None or len(self._turns) < 2:
            return None
        later = self._turns[1:]
        return Kept(
            answer=self._first,
            seconds={phase: statistics.median(turn[phase] for turn in later) for phase in TAKEN_OVER},
            peak_bytes={phase: phase_peak_bytes[phase] for phase in TAKEN_OVER if phase in phase_peak_bytes},
        )

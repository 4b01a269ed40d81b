"""Reuse of rollouts: completions of one candidate serve others with the same batch.

With the same generation batch and engine, micro-batch, accumulation and checkpointing do not affect generation. A later
candidate then only trains, on completions of an earlier one, and its result includes the seconds measured there. Reuse is
reported and never part of a certificate: the longer probe of a finalist generates.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Settings without effect on a rollout, apart from the rows of a whole generation batch.
NOT_IN_GENERATION = frozenset({
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_empty_cache_steps",
})  # fmt: skip
REUSED_PHASES = ("rollout", "sync")  # phases of one generation
MAX_CACHED = 8  # generation batches in the cache; each has a few megabytes of token ids


@dataclass(frozen=True)
class CachedRollout:
    """One generation batch and its cost."""

    answer: Any  # what TRL's method returns: token ids, and their log-probabilities if the engine has them
    seconds: Mapping[str, float]  # median over the generations after the first, by phase
    peak_bytes: Mapping[str, int]  # peak memory of the process, by phase


class RolloutCache(dict[str, CachedRollout]):
    """Latest generation batches of one rank since its load."""

    def put(self, key: str, rollout: CachedRollout) -> None:
        self.pop(key, None)
        self[key] = rollout
        while len(self) > MAX_CACHED:
            del self[next(iter(self))]


def key_of(settings: Mapping[str, Any], *, rows: int, prompt: int | None, completion: int, typical: bool, seed: int) -> str:
    """Key that is equal for equal rollouts."""
    relevant = {name: str(value) for name, value in sorted(settings.items()) if name not in NOT_IN_GENERATION}
    return json.dumps([relevant, rows, prompt, completion, typical, seed])


@dataclass
class Rollouts:
    """Generations of one run."""

    recorder: Any
    source: CachedRollout | None = None  # rollout to reuse; None runs all generations
    real_first: int = 0  # generations that run in any case, for their effect on an allocator that keeps its blocks
    run: int = 0
    borrowed: int = 0
    borrowed_seconds: dict[str, float] = field(default_factory=dict)
    _turns: list[dict[str, float]] = field(default_factory=list)
    _first: Any = None

    def turn(self, generate: Callable[[], Any]) -> Any:
        """Run or reuse one generation."""
        if self.source is not None and self.run >= self.real_first:
            self.borrowed += 1
            for phase, seconds in self.source.seconds.items():
                self.borrowed_seconds[phase] = self.borrowed_seconds.get(phase, 0.0) + seconds
            return self.source.answer
        before = self.recorder.seconds()
        answer = generate()
        after = self.recorder.seconds()
        self._turns.append({phase: after[phase] - before[phase] for phase in REUSED_PHASES})
        self._first = answer if self.run == 0 else self._first
        self.run += 1
        return answer

    def cacheable(self, phase_peak_bytes: Mapping[str, int]) -> CachedRollout | None:
        """Return the rollout for later candidates; None after too few generations to time it."""
        if self.source is not None or len(self._turns) < 2:
            return None
        return CachedRollout(
            answer=self._first,
            seconds={phase: statistics.median(turn[phase] for turn in self._turns[1:]) for phase in REUSED_PHASES},
            peak_bytes={phase: phase_peak_bytes[phase] for phase in REUSED_PHASES if phase in phase_peak_bytes},
        )

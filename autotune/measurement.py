"""Measurement: the facts of one probe, and nothing that was only computed.

What was not measured is None, with the reason beside it; never 0 and never infinity.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

Phase = Literal["load", "rollout", "sync", "reward", "score", "forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("load", "rollout", "sync", "reward", "score", "forward", "backward", "optimizer")


class Outcome(StrEnum):
    """How a candidate ended. OOMs name the phase in which memory ran out."""

    OK = "ok"
    OOM_LOAD = "oom_load"
    OOM_ROLLOUT = "oom_rollout"
    OOM_SYNC = "oom_sync"
    OOM_REWARD = "oom_reward"
    OOM_SCORE = "oom_score"
    OOM_FORWARD = "oom_forward"
    OOM_BACKWARD = "oom_backward"
    OOM_OPTIMIZER = "oom_optimizer"
    OOM_HOST = "oom_host"
    ILLEGAL = "illegal"
    TIMEOUT = "timeout"
    CRASH = "crash"
    INTERRUPTED = "interrupted"
    IMPLIED = "implied"
    SCREENED = "screened"

    @property
    def is_out_of_memory(self) -> bool:
        return self.value.startswith("oom_")

    @classmethod
    def out_of_memory_in(cls, phase: Phase) -> Outcome:
        return cls(f"oom_{phase}")


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Whole generation cycles, timed after the warm-up."""

    completion_tokens: int
    """Longest completion that was forced in these cycles, in tokens."""

    cycle_seconds: tuple[float, ...]
    """Wall seconds of each timed cycle, the slowest rank's."""

    cycle_loss_tokens: tuple[int, ...]
    """Completion tokens that entered the loss in each of these cycles, over all ranks."""

    prompt_tokens: int
    """Prompt tokens of the timed cycles, reported apart: they count for nothing."""

    phase_seconds: Mapping[str, float]
    """Exclusive seconds of the timed cycles by phase, and `other` for the rest; they sum to the cycles' seconds."""

    user_reward_seconds: float = 0.0
    """Seconds inside the user's own reward functions, a part of the phase `reward`."""

    cut_short: bool = False
    """True where the probe was stopped early because it could not become the best any more."""

    @property
    def tokens_per_second(self) -> float:
        """Loss tokens over wall seconds of the cycles, by the median cycle, which one hiccup does not move."""
        return statistics.median(self._rates)

    @property
    def spread(self) -> float | None:
        """Half of the distance between the fastest and the slowest cycle, as a share of the median; None for a single cycle."""
        rates = self._rates
        return (max(rates) - min(rates)) / 2 / self.tokens_per_second if len(rates) > 1 else None

    @property
    def _rates(self) -> list[float]:
        return [tokens / seconds for tokens, seconds in zip(self.cycle_loss_tokens, self.cycle_seconds, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peaks of one probe."""

    peak_bytes: int | None
    """What the limit is held against. CPU: the process tree's anonymous and shared memory, together. GPU: the worst
    rank's device memory."""

    limit_bytes: int
    """The limit that bound the probe."""

    bound_by: str
    """What enforced the limit: `cgroup-v1`, `cgroup-v2`, `rlimit`, `device` ..., several joined by `+`."""

    phase_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """Peak while each phase ran, summed over ranks on a CPU, the worst rank's on GPUs; phases that never ran are absent."""

    torch_allocated_bytes: int | None = None
    """torch's own peak of allocated bytes, the worst rank's; None on a CPU, for which torch keeps no such figure."""

    torch_reserved_bytes: int | None = None
    """torch's own peak of reserved bytes, the worst rank's; None on a CPU."""

    allocation_retries: int | None = None
    """How often torch's allocator had to flush its cache and try again; None on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a candidate did not end well, in the failing process's own words."""

    evidence: str
    """The one line that decided it."""

    phase: Phase | None = None
    """The phase it happened in, where known."""

    cause: str | None = None
    """One of the causes of `autotune.failures`, where known."""

    rank: int | None = None
    """The first rank that failed."""

    numbers: Mapping[str, int] = field(default_factory=dict)
    """What the message itself measured: asked_bytes, free_bytes, total_bytes, longest_length."""

    excerpt: str = ""
    """The last lines of the failing traceback or log."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What it took to measure."""

    total_seconds: float
    """From asking the rig until it answered, a load that this candidate caused included."""

    load_seconds: float
    """Seconds of loading that this candidate caused; 0 when the rig was warm."""

    setup_seconds: float = 0.0
    """Seconds of building the trainer and tearing it down."""

    loop_seconds: float = 0.0
    """Seconds inside the training loop itself, the warm-up included."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Everything one probe found out about one candidate."""

    candidate_id: str
    outcome: Outcome
    memory: Memory
    cost: Cost
    worst: Speed | None = None
    """Every completion forced to its longest."""

    typical: Speed | None = None
    """Completions forced to the typical length, where one is known."""

    optimizer_steps: int = 0
    """How many optimizer steps ran at worst-case lengths."""

    effective: Mapping[str, object] = field(default_factory=dict)
    """Settings as the trainer itself reports them after construction."""

    failure: Failure | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the interpreter and the packages that ran the loop."""

    @property
    def ranking_speed(self) -> Speed | None:
        """Typical lengths where they are known, worst-case ones otherwise."""
        return self.typical or self.worst

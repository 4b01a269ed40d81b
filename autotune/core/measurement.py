"""Measurement: measured facts of one probe, and the plan of that probe.

Unmeasured values are None, with the reason in a neighbouring field; never 0 and never infinity.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Literal

import msgspec

from autotune.core.units import format_bytes

Rewards = Literal["real", "skip"]
"""Reward functions of a script in a probe. `skip`: none is called."""


@dataclass(frozen=True, kw_only=True)
class ProbePlan:
    """Number of steps and cycles of one probe, and its stop rules."""

    optimizer_steps: int = 2  # minimum: Adam's state appears after the first step
    warmup_cycles: int = 1  # generation cycles before the timing
    timed_cycles: int = 3
    settling_cycles: int = 0  # bound of further warm-up cycles, until the speed is steady
    varied_lengths: bool = False  # also run completions of other lengths than the longest
    save_checkpoint: bool = False  # save one checkpoint into scratch, to measure its memory
    evaluate: bool = False  # one batch at the longest lengths, if configured
    soak_seconds: float | None = None  # run whole cycles for this long instead of `timed_cycles`
    reuse_rollouts: bool = False  # of an earlier candidate with the same generation batch
    deadline_seconds: float = 600.0  # wall seconds until the probe is terminated from outside
    # Stop early if the candidate cannot reach this
    stop_below_tokens_per_second: float | None = None
    cycle_spread: float = 0.05  # minimum relative standard deviation, for the stop rule


Phase = Literal["load", "rollout", "sync", "reward", "score", "forward", "backward", "optimizer"]
"""Part of a generation cycle. `load` comes before the first one."""

PHASES: tuple[Phase, ...] = (
    "load",
    "rollout",
    "sync",
    "reward",
    "score",
    "forward",
    "backward",
    "optimizer",
)

# Figures in messages of a probe's processes, with their bounds.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Outcome(StrEnum):
    """Result of a probe. An out-of-memory outcome names the phase."""

    OK = "ok"
    OOM_LOAD = "oom_load"
    OOM_ROLLOUT = "oom_rollout"
    OOM_SYNC = "oom_sync"
    OOM_REWARD = "oom_reward"
    OOM_SCORE = "oom_score"
    OOM_FORWARD = "oom_forward"
    OOM_BACKWARD = "oom_backward"
    OOM_OPTIMIZER = "oom_optimizer"
    OOM_UNKNOWN = "oom_unknown"  # phase unknown: `--framework command` reports none
    OOM_HOST = "oom_host"
    ILLEGAL = "illegal"
    TIMEOUT = "timeout"
    CRASH = "crash"
    INTERRUPTED = "interrupted"
    IMPLIED = "implied"
    SCREENED = "screened"

    @property
    def is_out_of_memory(self) -> bool:
        return self.startswith("oom_")

    @classmethod
    def out_of_memory_in(cls, phase: Phase) -> Outcome:
        return cls(f"oom_{phase}")


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Timing of whole generation cycles after the warm-up."""

    # Length that completions were forced to, tokens; of drawn lengths the mean
    completion_tokens: int
    cycle_seconds: tuple[float, ...]  # wall seconds per timed cycle, slowest rank
    cycle_loss_tokens: tuple[int, ...]  # completion tokens in the loss per cycle, over all ranks
    prompt_tokens: int  # prompt tokens of the timed cycles; not part of the speed
    phase_seconds: Mapping[str, float]  # exclusive, with `other`; sum: seconds of all cycles
    user_reward_seconds: float = 0.0  # user's reward functions; part of `reward`
    cut_short: bool = False  # stopped early because the candidate could not become the best
    borrowed_seconds: float = 0.0  # rollouts reused from an earlier candidate
    runs: int = 1  # runs whose cycles these are; more than one after pooling
    drawn: bool = False  # each completion had a length of its own, drawn from those that occur
    left_out_cycles: int = 0  # after the planned warm-up, before the speed was steady
    steady: bool | None = None  # the first two timed cycles are alike; None: not compared
    # Seconds between the slowest and the fastest rank in each phase; empty for one rank
    rank_skew: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def tokens_per_second(self) -> float:
        """Median over cycles of (loss tokens / wall seconds). Cached: read very often."""
        return statistics.median(self.rates)

    @cached_property
    def scatter(self) -> float | None:
        """Standard deviation of the log rate of single cycles; None for fewer than two cycles."""
        rates = self.rates
        if len(rates) < 2 or min(rates) <= 0:
            return None
        return statistics.stdev(map(math.log, rates))

    @property
    def spread(self) -> float | None:
        """(max - min) / 2 of the cycles' rates, relative to the median; None for a single cycle."""
        rates = self.rates
        if len(rates) < 2:
            return None
        return (max(rates) - min(rates)) / 2 / self.tokens_per_second

    @property
    def rates(self) -> list[float]:
        """Loss tokens per second of each cycle."""
        cycles = zip(self.cycle_loss_tokens, self.cycle_seconds, strict=True)
        return [tokens / seconds for tokens, seconds in cycles]


MeasuredBy = Literal["nvml-processes", "nvml-device", "torch"]
"""Source of a device memory figure. nvml-processes: used bytes of the device minus other
processes in NVML's list. nvml-device: used bytes minus those before the probe, where the list
has no bytes. torch: the ranks, without NVML.
"""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of one GPU during one probe. None: unknown."""

    index: int  # driver index; CUDA index where the driver was not queried
    uuid: str | None
    name: str | None
    peak_bytes: int | None  # peak of the probe, CUDA contexts and non-torch memory included
    measured_by: MeasuredBy
    why: str | None = None  # reason for a less exact source than nvml-processes
    phase_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    processes_peak_bytes: int | None = None  # sum over NVML's list of processes
    others_bytes: int | None = None  # other processes at the start, without ballast
    others: tuple[str, ...] = ()  # descriptions: `python (pid 4711, ada): 3 GiB`
    ballast_bytes: int | None = None  # allocated to emulate a smaller card; None: no need


@dataclass(frozen=True, kw_only=True)
class TorchMemory:
    """torch's allocator statistics of one phase: peaks of the worst rank, counts over all ranks."""

    allocated_bytes: Count
    reserved_bytes: Count | None  # None under vLLM's sleep mode: torch counts offloaded memory
    retries: Count  # cache flushes followed by a retry
    out_of_memory: Count  # failed allocations, caught or not


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """Bytes of one rank's model tensors after an optimizer step; each storage counts once."""

    rank: int
    bytes: Mapping[str, int]
    """Bytes by part, named as in a prediction's breakdown: `weights`, `adapters`, `gradients`,
    `optimizer` of the policy, `<role>_weights` of other models, suffix `_on_host` for offloaded
    parts.
    """


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """Memory of one time interval of a probe, sampled from outside."""

    seconds: float  # end of the interval, since the start of the probe
    peak_bytes: int  # process tree (CPU) or fullest device (GPU)
    phase: Phase | None  # phase of the peak; None between phases


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak memory of one probe."""

    peak_bytes: int | None  # CPU: anonymous + shared memory of the process tree; GPU: worst device
    limit_bytes: int  # the requested limit, or the GPU's free memory where that is less
    # Mechanism of the limit, joined by `+`: `cgroup-v1`, `cgroup-v2`, `rlimit`; on GPUs `device`
    # (its own size), `ballast` (autotune allocates the rest), `torch` (cap of torch's allocator)
    bound_by: str
    # Sum over ranks (CPU) or worst device (GPU); phases that never ran are absent
    phase_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    devices: tuple[DeviceMemory, ...] = ()  # empty on a CPU
    torch_by_phase: Mapping[str, TorchMemory] = field(default_factory=dict)  # empty on a CPU
    # torch's counters on the worst rank; None on a CPU
    torch_allocated_bytes: int | None = None
    torch_reserved_bytes: int | None = None  # also None where it is misleading, see TorchMemory
    torch_reserved_why: str | None = None  # reason for None on a GPU
    allocation_retries: int | None = None
    allocation_failures: int | None = None
    # Ranks whose models were inspected; empty for `--framework command`. A framework with one
    # process group per model numbers the ranks of each group from zero.
    models: tuple[ModelMemory, ...] = ()
    # Samples, coarser for long probes; exact peaks may exceed them
    timeline: tuple[MemorySample, ...] = ()
    # Lowest peak of a run at the longest lengths, where several runs or lengths were measured
    lowest_peak_bytes: int | None = None

    @property
    def spread_bytes(self) -> int:
        """Difference between the highest and the lowest peak; 0 where only one is known."""
        if self.peak_bytes is None or self.lowest_peak_bytes is None:
            return 0
        return self.peak_bytes - self.lowest_peak_bytes

    def on_first(self, devices: int | None) -> Memory:
        """Return the peaks of the first devices only; all of them for None, and where a device
        is unknown.
        """
        if devices is None or len(self.devices) < devices:
            return self
        first = self.devices[:devices]
        peaks = [device.peak_bytes for device in first if device.peak_bytes is not None]
        if len(peaks) < devices:
            return self
        return replace(self, peak_bytes=max(peaks), phase_peak_bytes=highest_by_phase(first))


def highest(figures: Iterable[int | None]) -> int | None:
    """Return the largest of the known figures; None where none is known."""
    return max((figure for figure in figures if figure is not None), default=None)


def highest_by_phase(memories: Sequence[DeviceMemory | Memory]) -> dict[str, int]:
    """Return the highest peak of each phase."""
    highest: dict[str, int] = {}
    for memory in memories:
        for phase, peak_bytes in memory.phase_peak_bytes.items():
            highest[phase] = max(peak_bytes, highest.get(phase, 0))
    return highest


Watched = Literal["online", "offline", "outside"]
"""online: loop with rollouts; offline: loop over rows; outside: command seen through its logs."""


@dataclass(frozen=True, kw_only=True)
class LoopActivity:
    """Events of one probe as its ranks counted them; the minimum over ranks."""

    watched: Watched = "online"
    optimizer_steps: Count = 0
    generations: Count = 0  # rollouts that were run
    borrowed_generations: Count = 0  # rollouts reused from an earlier candidate
    weight_syncs: Count | None = None  # weight updates of the engine; None: no engine
    sleeps: Count | None = None  # None: no engine with a sleep mode
    wakes: Count | None = None
    checkpoint_saves: Count = 0
    evaluations: Count | None = None  # None: the user's configuration never evaluates
    shortest_prompt: Count | None = None  # tokens
    longest_prompt: Count | None = None
    shortest_completion: Count | None = None
    longest_completion: Count | None = None
    varied_generations: Count | None = None  # with varied lengths; None: not part of the probe
    seconds: Seconds = 0.0  # wall seconds in the training loop, saving and evaluation included
    cycles: tuple[CycleMemory, ...] = ()  # intervals of whole cycles, in order; worst rank


@dataclass(frozen=True, kw_only=True)
class CycleMemory:
    """Memory of one process over an interval of whole generation cycles."""

    steps: Count  # optimizer steps done at its end
    seconds: Seconds  # since training began
    peak_bytes: Count  # GPU: torch's reserved bytes plus device memory outside torch
    held_bytes: Count  # at the end of the interval


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Cause of a failed probe, quoted from the failing process."""

    evidence: str  # the decisive line
    phase: Phase | None = None
    cause: str | None = None  # a cause of `autotune.failures`
    rank: int | None = None  # first rank that failed
    row: str | None = None  # matching row of the failure table
    # Names: failures/tables/meanings.yaml
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    excerpt: str = ""  # last lines of the traceback or log
    from_outside: bool = False  # ended by a signal of another process: no verdict on the candidate


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time that a measurement took."""

    total_seconds: float  # request to reply, including a load caused by this candidate
    load_seconds: float  # 0 when the model was already loaded
    setup_seconds: float = 0.0  # building and tearing down the trainer
    loop_seconds: float = 0.0  # inside the training loop, warm-up included
    device_seconds: float | None = None  # wall seconds x GPUs; None on a CPU


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Results of one probe of one candidate."""

    candidate_id: str
    outcome: Outcome
    memory: Memory
    cost: Cost
    worst: Speed | None = None  # all completions forced to the longest length
    # Completions of the lengths that occur, or of a typical one, where known
    typical: Speed | None = None
    optimizer_steps: int = 0  # steps at worst-case lengths
    effective: Mapping[str, object] = field(default_factory=dict)  # reported by the trainer
    exercised: LoopActivity | None = None  # None: not reported by the ranks
    failure: Failure | None = None
    versions: Mapping[str, str] = field(default_factory=dict)  # of the training environment
    beside: int | None = None  # maximum of concurrent probes on the machine; None: not counted
    printed: str = ""  # end of the probe's output, secrets removed
    caveats: tuple[str, ...] = ()  # restrictions of these figures, one sentence each
    emulated: bool = False  # memory on emulated GPUs, speed by prediction; nothing was measured

    @property
    def basis(self) -> Literal["measured", "emulated"]:
        return "emulated" if self.emulated else "measured"

    @property
    def ended_from_outside(self) -> bool:
        """True if another process ended the probe, so that it must be measured again."""
        if self.outcome is not Outcome.INTERRUPTED or self.failure is None:
            return False
        return self.failure.from_outside

    @property
    def requested_bytes(self) -> int | float:
        """Size of the allocation that failed; 0 where the message does not name it."""
        if self.failure is None:
            return 0
        return self.failure.numbers.get("asked_bytes", 0)

    @property
    def ranking_speed(self) -> Speed | None:
        """Speed at typical lengths where known, else at worst-case lengths."""
        return self.typical or self.worst


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of the comparison with its reason."""

    fits: bool
    why: str
    margin_bytes: int | None  # limit minus peak; negative when over; None: peak unknown


def judge(measurement: Measurement) -> Verdict:
    """Return the verdict: fits means a good end and a peak within the limit."""
    peak = measurement.memory.peak_bytes
    limit = measurement.memory.limit_bytes
    margin = None if peak is None else limit - peak
    if measurement.outcome is not Outcome.OK:
        evidence = measurement.failure.evidence if measurement.failure else "no reason was given"
        return Verdict(
            fits=False,
            why=f"{measurement.outcome}: {evidence}",
            margin_bytes=margin,
        )
    if peak is None:
        why = "it ended well, but its peak memory could not be measured"
        return Verdict(
            fits=False,
            why=why,
            margin_bytes=None,
        )
    why = f"peak {format_bytes(peak)} against the limit of {format_bytes(limit)}"
    return Verdict(
        fits=peak <= limit,
        why=why,
        margin_bytes=margin,
    )

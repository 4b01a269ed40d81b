"""Measurement: the facts of one probe, and nothing that was only computed.

What was not measured is None, with the reason beside it; never 0 and never infinity.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
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
    OOM_UNKNOWN = "oom_unknown"
    """In no phase that can be told: a command of the user's own does not say where it is."""

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

    borrowed_seconds: float = 0.0
    """Of the cycles' seconds, those of rollouts that were measured on an earlier candidate with the same generation batch, on
    the same rig, and taken over instead of being run again."""

    @cached_property
    def tokens_per_second(self) -> float:
        """Loss tokens over wall seconds of the cycles, by the median cycle, which one hiccup does not move. Reckoned once: a
        search asks it of thousands of trials before each probe."""
        return statistics.median(self.rates)

    @cached_property
    def scatter(self) -> float | None:
        """Standard deviation of the logarithm of single cycles' rates; None where that can't be told. Reckoned once as well."""
        rates = self.rates
        return statistics.stdev(map(math.log, rates)) if len(rates) > 1 and min(rates) > 0 else None

    @property
    def spread(self) -> float | None:
        """Half of the distance between the fastest and the slowest cycle, as a share of the median; None for a single cycle."""
        rates = self.rates
        return (max(rates) - min(rates)) / 2 / self.tokens_per_second if len(rates) > 1 else None

    @property
    def rates(self) -> list[float]:
        """Loss tokens per second, cycle by cycle."""
        return [tokens / seconds for tokens, seconds in zip(self.cycle_loss_tokens, self.cycle_seconds, strict=True)]


MeasuredBy = Literal["nvml-processes", "nvml-device", "torch"]
"""Who told a device's memory. nvml-processes: the device's used bytes less what NVML's list of processes gives to others.
nvml-device: the device's used bytes less those before the probe, where that list does not tell. torch: the ranks themselves,
where NVML does not answer."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """One GPU during one probe. None is unknown, never nothing."""

    index: int
    """As the driver counts; where the driver was not asked, as CUDA does."""

    uuid: str | None
    name: str | None
    peak_bytes: int | None
    """The most that the probe held of it, its contexts and whatever is outside torch included."""

    measured_by: MeasuredBy
    why: str | None = None
    """Why it was not measured in the best way; None where it was."""

    phase_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    processes_peak_bytes: int | None = None
    """The most that the probe's own processes were given in NVML's list, together: without what the driver books to nobody."""

    others_bytes: int | None = None
    """Held by others when the probe began; autotune's own ballast is not among them."""

    others: tuple[str, ...] = ()
    """Who they are, as far as they can be told: `python (pid 4711, ada): 3 GiB`."""

    ballast_bytes: int | None = None
    """Held by autotune itself, so that the rest is as large as the card that is asked about; None where there was no need."""


@dataclass(frozen=True, kw_only=True)
class TorchMemory:
    """torch's allocator while one phase ran: the worst rank's peaks, all ranks' counts."""

    allocated_bytes: int
    reserved_bytes: int | None
    """None where it misleads: under vLLM's sleep mode, torch counts what sleeps as reserved."""

    retries: int
    """How often it flushed its cache and tried again."""

    out_of_memory: int
    """How often it gave up, whether or not somebody caught the error."""


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """What the tensors of one rank's models were seen to hold after an optimizer step, each storage counted once."""

    rank: int
    bytes: Mapping[str, int]
    """By part, named as in a prediction's breakdown: the policy's `weights`, `adapters`, `gradients` and `optimizer`, another
    model's under its role (`reference_weights`), and with `_on_host` what lies on the host beside a GPU."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The memory of one stretch of a probe, sampled from outside."""

    seconds: float
    """Its end, counted from the probe's beginning."""

    peak_bytes: int
    """The most that was seen in it: of the process tree on a CPU, of the fullest device on GPUs."""

    phase: Phase | None
    """The phase in which that was; None between phases."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peaks of one probe."""

    peak_bytes: int | None
    """What the limit is held against. CPU: the process tree's anonymous and shared memory, together. GPU: the worst
    device's memory."""

    limit_bytes: int
    """The limit that bound the probe: the one that was asked for, or what others leave of the GPU where that is less."""

    bound_by: str
    """What enforced the limit: `cgroup-v1`, `cgroup-v2`, `rlimit`; on a GPU `device` (it is as large as the limit), `ballast`
    (autotune holds the rest of it), `torch` (its allocator's own cap); several joined by `+`."""

    phase_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """Peak while each phase ran, summed over ranks on a CPU, the worst device's on GPUs; phases that never ran are absent."""

    devices: tuple[DeviceMemory, ...] = ()
    """Every GPU of the probe; none on a CPU."""

    torch_by_phase: Mapping[str, TorchMemory] = field(default_factory=dict)
    """torch's own figures while each phase ran; none on a CPU."""

    torch_allocated_bytes: int | None = None
    """torch's own peak of allocated bytes, the worst rank's; None on a CPU, for which torch keeps no such figure."""

    torch_reserved_bytes: int | None = None
    """torch's own peak of reserved bytes, the worst rank's; None on a CPU, and where it misleads."""

    torch_reserved_why: str | None = None
    """Why that is None on a GPU."""

    allocation_retries: int | None = None
    """How often torch's allocator had to flush its cache and try again, on the worst rank; None on a CPU."""

    allocation_failures: int | None = None
    """How often it gave up, on the worst rank, whether or not somebody caught the error; None on a CPU."""

    models: tuple[ModelMemory, ...] = ()
    """Of the ranks whose models could be looked at: none of a command that nobody knows the models of. A framework that runs each
    model in processes of its own counts their ranks each from zero."""

    timeline: tuple[Moment, ...] = ()
    """The whole course of it, coarser the longer it took. Samples: a peak that ranks know exactly may lie above all of them."""


Watched = Literal["online", "offline", "outside"]
"""A loop that writes its own completions; one that trains on given rows; a command of which only its own records are seen."""


@dataclass(frozen=True, kw_only=True)
class Exercised:
    """What really happened in one probe, as its ranks counted it; of several ranks the least of every count."""

    watched: Watched = "online"
    optimizer_steps: int = 0
    generations: int = 0
    """Rollouts that were run."""

    borrowed_generations: int = 0
    """Rollouts that were taken over from an earlier candidate instead."""

    weight_syncs: int | None = None
    """How often the trainer's weights were pushed into the engine; None where there is no engine."""

    sleeps: int | None = None
    wakes: int | None = None
    """How often the engine was put to sleep, and woken for its cache; None where there is no engine that sleeps."""

    checkpoint_saves: int = 0
    evaluations: int | None = None
    """None where the user's configuration never evaluates."""

    shortest_prompt: int | None = None
    """Tokens of the shortest prompt that was trained on; the least of all ranks."""

    longest_prompt: int | None = None
    shortest_completion: int | None = None
    longest_completion: int | None = None
    seconds: float = 0.0
    """Wall seconds inside the training loop, saving and evaluating included."""

    cycles: tuple[Cycle, ...] = ()
    """One entry per timed stretch of whole cycles, in order; on several ranks the worst of them."""


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """Memory over one stretch of whole generation cycles."""

    steps: int
    """Optimizer steps done at its end."""

    seconds: float
    """Since training began."""

    peak_bytes: int
    """The most that one process held in it. On a GPU: what torch reserved and what the device shows beyond that."""

    held_bytes: int
    """What it held at its end."""


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

    row: str | None = None
    """The row of the table of failures that decided it, where one did; with the cause it says which way a knob must move."""

    numbers: Mapping[str, int | float] = field(default_factory=dict)
    """What the message itself measured, by the names of `autotune.failures.NUMBERS`: asked_bytes, free_bytes ..."""

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

    device_seconds: float | None = None
    """Wall seconds times GPUs held; None on a CPU."""


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

    exercised: Exercised | None = None
    """What the probe went through; None where the ranks did not say."""

    failure: Failure | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the interpreter and the packages that ran the loop."""

    beside: int | None = None
    """The most other probes that ran at the same time on the same machine; None where nobody counted."""

    printed: str = ""
    """The end of what the probe's processes printed, without what is secret."""

    caveats: tuple[str, ...] = ()
    """What narrows the meaning of these figures, a sentence each: speed under a ballast, say, is not a smaller card's."""

    @property
    def ranking_speed(self) -> Speed | None:
        """Typical lengths where they are known, worst-case ones otherwise."""
        return self.typical or self.worst

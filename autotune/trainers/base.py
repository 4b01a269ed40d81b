"""What autotune must know about a framework, and nothing else: one implementation per file.

A trainer turns knobs into settings, says which are legal and why the others are not, words the
request that a probe carries into the training environment, and writes the winner down in the
framework's own files. It imports no framework: it runs where none is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune.candidate import Candidate, Knobs
from autotune.composition import Composition
from autotune.hardware import Hardware
from autotune.space import SearchSpace
from autotune.trainers.trl_fields import Field
from autotune.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ProbePlan:
    """How much of the loop one probe runs."""

    optimizer_steps: int = 2
    """At least this many optimizer steps: Adam's state appears only after the first."""

    warmup_cycles: int = 1
    """Generation cycles left out of the timing."""

    timed_cycles: int = 3
    """Generation cycles that are timed."""

    save_checkpoint: bool = False
    """Also save one checkpoint, into scratch, for what saving takes in memory."""

    evaluate: bool = False
    """Also evaluate once, on one batch at the longest lengths, where the user's configuration evaluates at all."""

    soak_seconds: float | None = None
    """Go on for that long, in whole cycles, instead of `timed_cycles`, and say what memory each of them took."""

    reuse_rollouts: bool = False
    """Take rollouts over from an earlier candidate with the same generation batch on the same rig, where there is one: their
    seconds are counted as they were measured there."""

    deadline_seconds: float = 600.0
    """Wall seconds after which the probe is ended from outside."""

    stop_below_tokens_per_second: float | None = None
    """Once the candidate is known to fit, stop early if it can't reach this, by its cycles so far and their spread."""

    cycle_spread: float = 0.05
    """How much single cycles scatter on this machine at least (standard deviation, as a share): what that rule reckons with."""


@dataclass(frozen=True, kw_only=True)
class PromptLengths:
    """A dataset's prompts in tokens, as the framework makes them."""

    rows: int
    kept: int
    """How many are within the limit that was asked about; all of them where there was none."""

    percentiles: Mapping[int, int]
    """Per cent of the rows -> the length that so many do not exceed."""


@dataclass(frozen=True, kw_only=True)
class AtLength:
    """What goes when rows may be no longer than a percentile of them is."""

    share: int
    """Per cent of the rows that are within it."""

    length: int
    longer: int
    """Rows that are not."""

    cut: int
    """Tokens that go where those are truncated."""

    left_out: int
    """Tokens that go where those are left out."""


@dataclass(frozen=True, kw_only=True)
class RowLengths:
    """A dataset's rows in tokens, whole, as they are trained on."""

    rows: int
    looked_at: int
    """Fewer than all of a large dataset; what follows is about these."""

    tokens: int
    percentiles: tuple[AtLength, ...]
    """From the shortest to the longest row."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A workload on hardware: what every judgement of a trainer is about."""

    workload: Workload
    hardware: Hardware


class Trainer(Protocol):
    """One framework."""

    name: str
    """As `--framework` takes it."""

    adapter: str
    """Name of the module in `autotune.inside.adapters` that runs this framework's loop."""

    method: str
    """As `--method` takes it."""

    trace_adapter: str
    """Name of the module there that follows a step without a GPU."""

    needs: tuple[str, ...]
    """The packages that the training environment must have for that."""

    space: str
    """The search space that goes with it, where none is named."""

    measures: bool
    """Whether probes can run it; what can't be run can still be predicted."""

    canonical: Mapping[str, str]
    """What autotune's own flags hold (`max_prompt_length`, `max_completion_length`, `num_generations`, `lora_r`), in the
    framework's words. A flag that is not among them says nothing to it, and is refused."""

    said_by: Mapping[str, tuple[str, ...]]
    """Knob -> other settings that say the same: where all of them are given, the knob is not searched."""

    def fields(self) -> Mapping[str, Field]:
        """Every setting that the framework knows for this method, with its default."""
        ...

    def complete(self, knobs: Knobs, job: Job) -> Candidate:
        """The candidate that these knobs make: derived settings filled in, defaults named."""
        ...

    def why_illegal(self, candidate: Candidate, job: Job) -> str | None:
        """The framework's rule that the candidate breaks, in a sentence; None for a legal one. Static: no GPU time."""
        ...

    def baseline(self, space: SearchSpace, job: Job) -> Knobs:
        """The user's own configuration; without one, the framework's defaults at the held learning knobs."""
        ...

    def prompt_lengths(self, job: Job, limit: int | None = None) -> PromptLengths | None:
        """How long the dataset's prompts are, and how many are within `limit`; None where there is none that can be read."""
        ...

    def row_lengths(self, job: Job) -> RowLengths | None:
        """How long the dataset's rows are, where rows are what is trained on; None without a dataset. BadInput where it can't be
        read."""
        ...

    def load_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        """What the training environment must load for this candidate, as JSON."""
        ...

    def probe_request(self, candidate: Candidate, job: Job, plan: ProbePlan) -> Mapping[str, object]:
        """What it must then run and measure, as JSON."""
        ...

    def trace_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        """What is to be followed without a GPU, as `inside/tracing` specifies it."""
        ...

    def shortest(self, candidate: Candidate, job: Job) -> Candidate | None:
        """Where micro-batches hold only real tokens: the same with one row of the longest length in each, which is the least that
        data can make of them. None where their size does not follow the data."""
        ...

    def compose(self, candidate: Candidate, job: Job) -> Composition:
        """Which models are resident for this candidate, and the shape of its step."""
        ...

    def write_files(self, candidate: Candidate, job: Job, folder: Path) -> list[Path]:
        """The framework's own files for the final run, complete and ready to use."""
        ...


def other_global_batch(job: Job, made_by: str, total: int) -> str | None:
    """That another global batch is held than these settings make, in a sentence; None where it is this one, or none is held."""
    held = job.workload.global_batch
    return None if held in (None, total) else f"the global batch is held at {held}, and {made_by} makes {total}."


def count_of(settings: Mapping[str, object], name: str) -> int:
    """A number among the settings; 0 where it is not given, or no number."""
    value = settings.get(name)
    return value if isinstance(value, int) else 0

"""Frameworks whose step cannot be followed: a plain Hugging Face step stands in for it, with their own models around it.

Each framework's file says what its settings mean in the common words of `Step`; here they become a specification, a
Composition and an answer to what is legal. Nothing of the framework is imported. Where its GPUs are, its own command line is
started for a few steps, on made-up rows unless there is data, and measured from outside.
"""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from autotune.candidate import Candidate, Knobs, KnobValue, fingerprint
from autotune.composition import Composition
from autotune.errors import CannotPredict
from autotune.measurement import Phase
from autotune.space import SearchSpace
from autotune.trainers.base import Job, ProbePlan
from autotune.trainers.generic_step import STAND_IN, Step, compose, trace_request
from autotune.trainers.generic_table import Table
from autotune.trainers.launching import Figures, Launch, Launched, ToldSettings
from autotune.trainers.trl_fields import Field

TUNING = frozenset({"use_peft", "load_in_4bit"})
"""What --tuning holds, in TRL's words; here the workload says it."""

DEFAULT_LORA_RANK = 16
TEMPLATE_TOKENS = 64
"""What a chat template may add to a prompt."""


class StandIn(Launched):
    """A framework and method, as `autotune.trainers.base.Trainer` describes it."""

    file: str
    """The table of its settings, beside this file."""

    core: tuple[str, ...]
    """The settings that a candidate always states."""

    adjusts: tuple[str, ...] = ()
    """Knobs that take their first legal choice where the framework's own default does not suit the hardware."""

    launcher: str
    """How a run is started, settings following."""

    model_settings: tuple[str, ...]
    """Where its command line takes the model's folder or name."""

    not_told: frozenset[str] = frozenset()
    """Settings of autotune's own that its command line does not take."""

    phases: tuple[tuple[str, Phase | None], ...] = ()
    """What it prints where a phase begins."""

    environment: ClassVar[Mapping[str, str]] = {}
    """Of a probe."""

    told_settings: ToldSettings | None = None
    """Where a probe says what it took its settings to be."""

    trace_adapter = STAND_IN

    def __init__(self, method: str) -> None:
        self.method = method
        self.space = f"{self.name}-{method}" if method != "grpo" else self.name
        self.table = Table.read(self.file)

    @abstractmethod
    def derived(self, settings: Mapping[str, KnobValue], job: Job) -> dict[str, KnobValue]:
        """What the framework or the hardware leaves no choice about, where it was not given."""

    @abstractmethod
    def step(self, settings: Mapping[str, KnobValue], job: Job) -> Step:
        """What the settings mean."""

    @abstractmethod
    def refusals(self, settings: Mapping[str, KnobValue], job: Job) -> Iterator[str]:
        """The framework's own rules that the settings break."""

    @abstractmethod
    def not_followed(self, settings: Mapping[str, KnobValue]) -> Iterator[str]:
        """Settings that change the step's memory in a way that nothing here follows."""

    @abstractmethod
    def bounded(self, settings: Mapping[str, KnobValue], steps: int) -> dict[str, KnobValue]:
        """Settings that end a run after so many steps, save nothing and evaluate nothing."""

    @abstractmethod
    def material(self, settings: Mapping[str, KnobValue], job: Job) -> tuple[dict[str, KnobValue], dict[str, str]]:
        """Settings that name the data and the reward of a probe, and the files that these are. The user's own data where there
        is any."""

    @abstractmethod
    def figures(self, settings: Mapping[str, KnobValue]) -> Figures:
        """Where it tells how fast it is: completion tokens, and the seconds of whole steps."""

    @abstractmethod
    def data(self, dataset: str) -> dict[str, KnobValue]:
        """Settings that name the user's own data."""

    @abstractmethod
    def with_one_row(self, settings: Mapping[str, KnobValue]) -> dict[str, KnobValue] | None:
        """The settings with one row in each micro-batch; None where micro-batches are padded, or are of one row already."""

    # What a Trainer answers.

    def fields(self) -> Mapping[str, Field]:
        return self.table.fields

    def complete(self, knobs: Knobs, job: Job) -> Candidate:
        held = {self.canonical.get(name, name): value for name, value in job.workload.held.items() if name not in TUNING}
        given = {**held, **{name: value for name, value in job.workload.held.items() if name in self.table.fields}}
        given |= {name: value for name, value in knobs.items() if value is not None}
        settings: dict[str, KnobValue] = {name: value for name, value in given.items() if value is not None}
        reason = next(self.not_followed(settings), None)
        if reason is not None:
            raise CannotPredict(f"{reason}, which the step that stands in for {self.name}'s does not have.")
        for name, value in self.derived(settings, job).items():
            settings.setdefault(name, value)
        for name in self.core:
            settings.setdefault(name, self.table.value(settings, name))
        return Candidate(knobs=knobs, settings=settings, load=_load(settings, job))

    def why_illegal(self, candidate: Candidate, job: Job) -> str | None:
        return next(self._refusals(candidate.settings, job), None)

    def _refusals(self, settings: Mapping[str, KnobValue], job: Job) -> Iterator[str]:
        if job.hardware.kind != "cuda":
            yield (
                f"{self.name} trains on GPUs, and was asked about {job.hardware}: name some with --gpus, like --gpus 2xA100-80G. "
                "Those that are not here are predicted."
            )
            return
        if "sharding" in job.workload.held:
            yield f"sharding is TRL's; {self.name} says it itself, see `autotune show knobs --space {self.space}`."
        for name in settings:
            if name not in self.table.fields and name not in self.canonical:
                yield f"{name} is no setting of {self.name}'s: the table of {self.table.version} does not have it."
        wrong = [words for name, value in settings.items() if (words := self.table.wrong(name, value))]
        yield from wrong
        if not wrong:
            yield from self.refusals(settings, job)

    def baseline(self, space: SearchSpace, job: Job) -> Knobs:
        """The framework's own values where it has them, and the least memory where it has none."""
        held = {self.canonical.get(name, name): value for name, value in job.workload.held.items()} | dict(job.workload.held)
        fixed = {knob.name: self._own(knob.name, knob.choices, held) for knob in space.knobs}
        knobs = space.applicable(fixed)
        if self.why_illegal(self.complete(knobs, job), job) is None:
            return knobs
        for knob in space.knobs:
            for choice in knob.choices if knob.name in self.adjusts and knob.name not in held else ():
                other = space.applicable({**fixed, knob.name: choice})
                if self.why_illegal(self.complete(other, job), job) is None:
                    return other
        return knobs

    def _own(self, name: str, choices: tuple[KnobValue, ...], held: Mapping[str, KnobValue]) -> KnobValue:
        if name in held:
            return held[name]
        if name in self.said_by and all(other in held for other in self.said_by[name]):
            return None
        own = self.table.fields[name].default if name in self.table.fields else None
        typed = [(type(choice), choice) for choice in choices]
        return own if (type(own), own) in typed and (own is None or isinstance(own, bool | int | float | str)) else choices[0]

    def shortest(self, candidate: Candidate, job: Job) -> Candidate | None:
        settings = self.with_one_row(candidate.settings)
        return None if settings is None else Candidate(knobs=candidate.knobs, settings=settings, load=candidate.load)

    def trace_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        return trace_request(self.step(candidate.settings, job), job)

    def compose(self, candidate: Candidate, job: Job) -> Composition:
        return compose(self.step(candidate.settings, job), job)

    def launch(self, candidate: Candidate, job: Job, plan: ProbePlan | None = None) -> Launch:
        """The final run's command line; with a plan, one that ends after a few steps and leaves nothing behind."""
        settings: dict[str, KnobValue] = dict(candidate.settings)
        files: dict[str, str] = {}
        if plan is not None:
            steps = max(plan.optimizer_steps, plan.warmup_cycles + plan.timed_cycles)
            named, files = self.material(settings, job)
            settings |= {**self.bounded(settings, steps), **named}
        elif job.workload.dataset is not None:
            settings |= {**self.data(job.workload.dataset)}
        _, *words = shlex.split(self.launcher)
        rendered = [word for line in self.told(settings, job) for word in shlex.split(line)]
        environment = self.environment if plan else {}
        return Launch(
            argv=(str(job.workload.python), *words, *rendered), figures=self.figures(settings), environment=environment,
            files=files, phases=self.phases, effective=self.told_settings if plan else None,
        )  # fmt: skip

    def told(self, settings: Mapping[str, KnobValue], job: Job) -> list[str]:
        """Every setting as its command line takes it, the model among them."""
        model = str(job.workload.model.folder or job.workload.model.name)
        named = {**dict.fromkeys(self.model_settings, model), **settings}
        lines = [self.spelt(name, value) for name, value in named.items() if value is not None and name not in self.not_told]
        return [line for line in lines if line]

    def write_files(self, candidate: Candidate, job: Job, folder: Path) -> list[Path]:
        """The command line, a setting a line. Where it was only predicted it says so."""
        folder.mkdir(parents=True, exist_ok=True)
        data = self.data(job.workload.dataset) if job.workload.dataset is not None else {}
        lines = [self.launcher, *self.told({**candidate.settings, **data}, job)]
        what = f"{self.method.upper()} with {self.name} for {job.workload.model.name} on {job.hardware}"
        how = "measured" if job.hardware.here else "predicted, not measured"
        missing = "your reward" if data else "your data and your reward"
        head = f"# {what}: {how}.\n# Written for {self.name} {self.table.version}. Add {missing}.\n"
        path = folder / "recommended.sh"
        path.write_text("#!/bin/sh\n" + head + " \\\n  ".join(lines) + ' "$@"\n', encoding="utf-8")
        path.chmod(0o755)
        return [path]

    def spelt(self, name: str, value: KnobValue) -> str:
        """One setting as its command line takes it."""
        return f"{name}={str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))}"

    def lora_rank(self, settings: Mapping[str, KnobValue], job: Job, name: str) -> int:
        """The adapter's rank: as set, or what --tuning takes for granted."""
        given = settings.get(name)
        if isinstance(given, int):
            return given
        return 0 if job.workload.tuning == "full" else DEFAULT_LORA_RANK


def made_up_prompts(count: int, longest: int) -> list[str]:
    """Prompts that differ and are not too long: a digit with its blank is one token or two, and the template adds its own."""
    words = max(1, (longest - TEMPLATE_TOKENS) // 2)
    return [" ".join(str((number * 7919 + word * 31) % 997 % 10) for word in range(words)) for number in range(count)]


def _load(settings: Mapping[str, KnobValue], job: Job) -> dict[str, KnobValue]:
    """Nothing is loaded before the command starts: all of it tells candidates apart, and one rank starts it."""
    model = job.workload.model
    told = {"model": model.name, "model_config": model.fingerprint, "settings": fingerprint(settings)}
    return {**told, "ranks": 1, "device": job.hardware.kind}

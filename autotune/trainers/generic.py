"""Frameworks whose step cannot be followed: a plain Hugging Face step stands in for it, with their own models around it.

Each framework's file says what its settings mean in the common words of `Step`; here they become a specification, a
Composition and an answer to what is legal. Nothing of the framework is run or imported: it is predicted, and not measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, NoReturn

from autotune.candidate import Candidate, Knobs, KnobValue, fingerprint
from autotune.composition import Composition
from autotune.errors import CannotPredict, IllegalConfiguration
from autotune.space import SearchSpace
from autotune.trainers.base import Job, ProbePlan
from autotune.trainers.generic_step import Step, compose, trace_request
from autotune.trainers.generic_table import Table
from autotune.trainers.trl_fields import Field

TUNING = frozenset({"use_peft", "load_in_4bit"})
"""What --tuning holds, in TRL's words; here the workload says it."""

DEFAULT_LORA_RANK = 16


class StandIn(ABC):
    """A framework and method, as `autotune.trainers.base.Trainer` describes it."""

    name: str
    file: str
    """The table of its settings, beside this file."""

    canonical: ClassVar[Mapping[str, str]]
    """What autotune's own flags hold (`max_prompt_length`, `num_generations` and the like), in the framework's words."""

    core: tuple[str, ...]
    """The settings that a candidate always states."""

    adjusts: tuple[str, ...] = ()
    """Knobs that take their first legal choice where the framework's own default does not suit the hardware."""

    said_by: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Knob -> other settings that say the same: where all of them are given, the knob is left out."""

    launcher: str
    """How a run is started, settings following."""

    adapter = "generic_trace"
    trace_adapter = "generic_trace"
    needs: tuple[str, ...] = ("transformers", "peft")
    measures = False

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
            yield f"{self.name} trains on GPUs: name some with --gpus."
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

    def prompt_lengths(self, job: Job, limit: int | None = None) -> None:
        """Not read: nothing is measured here, so nothing gives way to it."""
        return None  # noqa: RET501 - an answer, and not an abstract method without a body

    def load_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        self._refuse()

    def probe_request(self, candidate: Candidate, job: Job, plan: ProbePlan) -> Mapping[str, object]:
        self._refuse()

    def write_files(self, candidate: Candidate, job: Job, folder: Path) -> list[Path]:
        """The command line. It was only predicted, and says so."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [self.launcher, *(self.spelt(name, value) for name, value in candidate.settings.items() if value is not None)]
        what = f"{self.method.upper()} with {self.name} for {job.workload.model.name} on {job.hardware}"
        head = f"# {what}: predicted, not measured.\n"
        body = (
            f"# Written for {self.name} {self.table.version}. Add your data and your reward.\n"
            + " \\\n  ".join(lines)
            + ' "$@"\n'
        )
        path = folder / "recommended.sh"
        path.write_text("#!/bin/sh\n" + head + body, encoding="utf-8")
        return [path]

    def spelt(self, name: str, value: KnobValue) -> str:
        """One setting as its command line takes it."""
        return f"{name}={str(value).lower() if isinstance(value, bool) else value}"

    def _refuse(self) -> NoReturn:
        raise IllegalConfiguration(
            f"{self.name} can be predicted, but not run by probes yet.", way_out="Ask `autotune predict`, or add --mode predict."
        )

    def lora_rank(self, settings: Mapping[str, KnobValue], job: Job, name: str) -> int:
        """The adapter's rank: as set, or what --tuning takes for granted."""
        given = settings.get(name)
        if isinstance(given, int):
            return given
        return 0 if job.workload.tuning == "full" else DEFAULT_LORA_RANK


def _load(settings: Mapping[str, KnobValue], job: Job) -> dict[str, KnobValue]:
    """Nothing is loaded: all of it tells candidates apart."""
    model = job.workload.model
    return {"model": model.name, "model_config": fingerprint(model.config), "settings": fingerprint(settings)}

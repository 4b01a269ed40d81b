"""A framework that is run by its own command line: what to start, what to write beside it, and where it tells its figures.

The other way is TRL's: its trainers are built and watched in the training interpreter itself. Who can only be started says
here how, and `inside/adapters/launched.py` starts it; memory is then measured from outside.
"""

from __future__ import annotations

import itertools
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from autotune.candidate import Candidate, Knobs, KnobValue
from autotune.composition import Composition
from autotune.errors import CannotPredict
from autotune.measurement import Phase
from autotune.space import SearchSpace
from autotune.trainers.base import Job, ProbePlan, PromptLengths, RowLengths
from autotune.trainers.trl_fields import Field

ADAPTER = "launched"
MADE_UP = "rows.jsonl"
"""The file of rows that stand in for a dataset where none was named."""

OUT = "{out}"
"""In a command line, an environment or a file: the run's own folder."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Where a run tells how fast it is. `inside/figures.py` reads it, and says what each of these means."""

    kind: Literal["json", "python", "pattern"]
    file: str | None = None
    """None is what the run prints."""

    line: str | None = None
    under: str | None = None
    keys: Mapping[str, tuple[str, ...]] | None = None
    """None: the figures stand under their own names, `tokens_per_second`, `tokens`, `seconds`."""

    products: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    times: float = 1.0
    tokens_each: int | None = None


@dataclass(frozen=True, kw_only=True)
class ToldSettings:
    """Where a run tells what it took its settings to be. `inside/settings.py` reads it, and says what each kind is."""

    kind: Literal["json", "hydra", "namespace", "table"]
    file: str | None = None
    """None is what the run prints."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A class of the framework's whose objects keep models."""

    cls: str
    """`module:Class`, as it is called where it is written; what Ray makes of it counts, as what else is made from it."""

    models: Mapping[str, str]
    """Role -> path of attributes. The roles are those of a Composition."""

    noted: bool = False
    """Noted when they are made. Others are searched for, which takes that no engine starts in their process: vLLM takes all that
    is older than itself out of what can be searched."""

    optimizer: str | None = None
    """The path to what trains them."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Where a run's own processes keep their models, and when there is something to see. `inside/watched.py` looks."""

    steps: tuple[str, ...]
    """`module:Class.method`, right after which a step's gradients and states are there. None that Ray copies into a class."""

    uses: tuple[str, ...] = ()
    """The same of processes that train nothing."""

    holders: tuple[Holder, ...]


OF_DEEPSPEED = "deepspeed.runtime.engine:DeepSpeedEngine"
STEP_OF_DEEPSPEED, USE_OF_DEEPSPEED = f"{OF_DEEPSPEED}._take_model_step", f"{OF_DEEPSPEED}.forward"
"""Its `step` is called after every micro-batch, this where one becomes a step of the optimizer."""

OF_TRANSFORMERS = Watch(
    steps=("transformers.trainer_callback:CallbackHandler.on_optimizer_step",),
    holders=(
        Holder(
            cls="transformers.trainer:Trainer",
            noted=True,
            models={"reference": "ref_model", "reward": "reward_funcs", "policy": "model"},
            optimizer="optimizer",
        ),
    ),
)
"""What trains with a trainer of transformers' or one made from it, as TRL's are."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One run of a framework."""

    argv: tuple[str, ...]
    figures: Figures
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Name -> content, written into the run's own folder before it starts."""

    folder: str | None = None
    """Where it is started; None is where autotune was."""

    phases: tuple[tuple[str, Phase | None], ...] = ()
    """A pattern for a line that is printed where a phase begins; None where one ends."""

    effective: ToldSettings | None = None
    """None where it nowhere says so."""


def probe_request(launch: Launch, plan: ProbePlan, settings: Iterable[str] = ()) -> dict[str, object]:
    """A bounded run, as JSON; `settings` are those to be read back."""
    return {**asdict(launch), "plan": asdict(plan), "settings": list(settings)}


class Launched(ABC):
    """What a framework that is started by its command line need not say for itself: a subclass is a `base.Trainer`.

    Of the settings it knows those in `defaults`; one rank starts it whatever the GPUs are, and nothing of it is predicted unless
    the subclass says what its step is like.
    """

    name: str
    method: str
    space: str
    needs: tuple[str, ...] = ()
    requires: ClassVar[Mapping[str, str]] = {}
    """Of what it needs: module -> the requirement that pip takes, its versions among it."""

    canonical: Mapping[str, str] = {}
    said_by: Mapping[str, tuple[str, ...]] = {}
    defaults: Mapping[str, KnobValue] = {}
    """Its settings under their own names, and what they are where nothing is said."""

    watch: ClassVar[Watch | None] = None
    """Where a probe sees its models, if that is known."""

    adapter = ADAPTER
    trace_adapter = ""
    measures = True

    @abstractmethod
    def launch(self, candidate: Candidate, job: Job, plan: ProbePlan | None = None) -> Launch:
        """The final run; with a plan, one that ends after a few steps and leaves nothing behind."""

    def why_illegal(self, candidate: Candidate, job: Job) -> str | None:
        """The framework's own rule that is broken, in a sentence."""
        return None

    def fields(self) -> Mapping[str, Field]:
        kinds = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null"}
        return {name: Field(owner="config", kinds=(kinds[type(value)],), default=value) for name, value in self.defaults.items()}

    def complete(self, knobs: Knobs, job: Job) -> Candidate:
        settings = {**self.defaults, **job.workload.held, **knobs}
        return Candidate(knobs=knobs, settings=settings, load=self.load_of(settings, job))

    def load_of(self, settings: Mapping[str, KnobValue], job: Job) -> dict[str, KnobValue]:
        """All candidates are started by the same rank, which loads nothing itself."""
        return {"model": job.workload.model.fingerprint, "ranks": 1, "device": job.hardware.kind}

    def baseline(self, space: SearchSpace, job: Job) -> Knobs:
        """What is held, or the first legal values of the space."""
        held = job.workload.held
        choices = [(held[knob.name],) if knob.name in held else knob.choices for knob in space.knobs]
        tried = [
            space.applicable(dict(zip((knob.name for knob in space.knobs), values, strict=True)))
            for values in itertools.islice(itertools.product(*choices), 1000)
        ]
        return next((knobs for knobs in tried if self.why_illegal(self.complete(knobs, job), job) is None), tried[0])

    def prompt_lengths(self, job: Job, limit: int | None = None) -> PromptLengths | None:
        """Its data is its own."""
        return None

    def row_lengths(self, job: Job) -> RowLengths | None:
        """Its rows are its own."""
        return None

    def shortest(self, candidate: Candidate, job: Job) -> Candidate | None:
        """Its batches are its own."""
        return None

    def load_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        return {"device": job.hardware.kind}

    def probe_request(self, candidate: Candidate, job: Job, plan: ProbePlan) -> Mapping[str, object]:
        watch = asdict(self.watch) if self.watch is not None else None
        return {**probe_request(self.launch(candidate, job, plan), plan, candidate.settings), "watch": watch}

    def trace_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        raise CannotPredict(f"{self.name} can be measured, and not predicted.", way_out="Measure it where the GPUs are.")

    def compose(self, candidate: Candidate, job: Job) -> Composition:
        raise CannotPredict(f"{self.name} can be measured, and not predicted.", way_out="Measure it where the GPUs are.")

    def write_files(self, candidate: Candidate, job: Job, folder: Path) -> list[Path]:
        """The final run's own files and a script that starts it."""
        folder.mkdir(parents=True, exist_ok=True)
        launch, script = self.launch(candidate, job), folder / "launch.sh"
        for name, text in launch.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text.replace(OUT, str(folder.resolve())), encoding="utf-8")
        script.write_text(shell_script(launch, candidate, job), encoding="utf-8")
        script.chmod(0o755)
        return [*(folder / name for name in launch.files), script]


def shell_script(launch: Launch, candidate: Candidate, job: Job) -> str:
    """The launch as a script that can be started from anywhere; its own folder holds what it writes."""
    values = " ".join(f"{name}={value}" for name, value in candidate.knobs.items()) or "nothing to choose"
    how = "measured" if job.hardware.here else "predicted"
    exports = "".join(f"export {name}={_quoted(value)}\n" for name, value in launch.environment.items())
    made_up = f"# {MADE_UP} beside this file is made up: put your own data in its place.\n" if MADE_UP in launch.files else ""
    folder = f"cd -- {shlex.quote(launch.folder)}\n" if launch.folder else ""
    return f"""#!/usr/bin/env bash
# The recommended run of {job.workload.model.name}: {values}, as autotune {how} it on {job.hardware}.
# Further arguments go to the command.
{made_up}set -euo pipefail
out="${{OUT:-$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)}}"
mkdir -p "$out"
{exports}{folder}exec {" ".join(_quoted(word) for word in launch.argv)} "$@"
"""


def _quoted(word: str) -> str:
    """For a shell, with the run's own folder where it was asked for."""
    return '"$out"'.join(shlex.quote(part) if part else "" for part in word.split(OUT)) if OUT in word else shlex.quote(word)

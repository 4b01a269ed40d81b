"""Frameworks that are predicted by a stand-in step, and measured by their own command line.

A subclass translates settings into a `StandInSpec`. This module completes candidates from the
settings table, checks legality and renders the command. It never imports the framework.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.core.candidate import Candidate, Knobs, KnobValue, fingerprint
from autotune.core.composition import EngineSettings
from autotune.core.errors import CannotPredict
from autotune.core.files import comments
from autotune.core.probe_plan import ProbePlan
from autotune.core.space import SearchSpace
from autotune.core.task import Task
from autotune.frameworks.base import Settings, as_word, model_path
from autotune.frameworks.framework_facts import filled, read_facts
from autotune.frameworks.hydra_values import quoted
from autotune.frameworks.launched_run import OUT, Figures, Launch, Launched, probe_steps, synthetic_prompts
from autotune.frameworks.settings_table import Field, SettingsTable, read_table
from autotune.frameworks.stand_in_step import STAND_IN, StandInSpec

TUNING = frozenset({"use_peft", "load_in_4bit"})
"""Held settings of TRL behind --tuning; stand-in frameworks read the workload instead."""

DEFAULT_LORA_RANK = 16


READERS = {"float": SettingsTable.share, "int": SettingsTable.count, "bool": SettingsTable.truth}
ENGINE_READERS = {field.name: READERS[str(field.type).partition(" ")[0]] for field in dataclasses.fields(EngineSettings)}
"""Field of `EngineSettings` -> reader of a setting of its type."""


class StandIn(Launched):
    """Method of a framework that is predicted by a stand-in step. A YAML file has its facts."""

    trace_adapter = STAND_IN

    def __init__(self, name: str, method: str) -> None:
        facts = self.facts = read_facts(name)
        self.name, self.method, self.table = name, method, read_table(facts.table)
        self.space = f"{name}-{method}" if method != "grpo" else name
        self.needs, self.requires, self.watch = tuple(facts.requires), facts.requires, facts.watch
        self.canonical, self.equivalent_settings = facts.canonical, facts.equivalent_settings

    @abstractmethod
    def derived(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        """Return the settings that the framework or the hardware determines unless they are given."""

    @abstractmethod
    def step(self, settings: Settings, task: Task) -> StandInSpec: ...

    @abstractmethod
    def rules(self, settings: Settings, task: Task) -> Iterator[str]:
        """Yield the framework's own rules that the settings break."""

    @abstractmethod
    def lengths(self, settings: Settings) -> tuple[int, int]:
        """Return the longest prompt and completion."""

    @abstractmethod
    def with_one_row(self, settings: Settings) -> Mapping[str, KnobValue]:
        """Return the settings that change for one row per micro-batch.

        Empty: micro-batches are padded."""

    def fields(self) -> Mapping[str, Field]:
        return self.table.fields

    def complete(self, knobs: Knobs, task: Task) -> Candidate:
        # 1. Given settings: held ones under both names, then knobs.
        held = task.workload.held
        given = {self.canonical.get(name, name): value for name, value in held.items() if name not in TUNING}
        given |= {name: value for name, value in held.items() if name in self.table.fields}
        given |= {name: value for name, value in knobs.items() if value is not None}
        settings: dict[str, KnobValue] = {name: value for name, value in given.items() if value is not None}
        if (reason := next(self.facts.reasons_untraced(settings), None)) is not None:
            raise CannotPredict(f"{reason}; the stand-in step of {self.name} does not model it.")
        # 2. Derived settings, then defaults.
        for name, value in self.derived(settings, task).items():
            settings.setdefault(name, value)
        for name in self.facts.core:
            settings.setdefault(name, self.table.value(settings, name))
        return Candidate(knobs=knobs, settings=settings, load=self.load_of(settings, task))

    def load_of(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        """Return a load with all settings: the worker loads nothing before the command starts."""
        model = task.workload.model
        identity = {"model": model.name, "model_config": model.fingerprint, "settings": fingerprint(settings)}
        return {**identity, "ranks": 1, "device": task.hardware.kind}

    def refusals(self, settings: Settings, task: Task) -> Iterator[str]:
        if task.hardware.kind != "cuda":
            yield (
                f"{self.name} requires GPUs, and the request is for {task.hardware}: name some with --gpus, "
                "like --gpus 2xA100-80G. GPUs of another machine are predicted."
            )
            return
        if "sharding" in task.workload.held:
            yield f"sharding belongs to TRL; for {self.name} see `autotune show knobs --space {self.space}`."
        for name in settings:
            if name not in self.table.fields and name not in self.canonical and name not in self.facts.own_settings:
                yield f"{name}: not a setting of {self.name} {self.table.version}."
        problems = [problem for name, value in settings.items() if (problem := self.table.problem(name, value))]
        yield from problems
        if not problems:
            yield from self.rules(settings, task)

    def baseline(self, space: SearchSpace, task: Task) -> Knobs:
        """Return the framework's defaults; knobs without a default take the least memory."""
        held = {self.canonical.get(name, name): value for name, value in task.workload.held.items()} | dict(task.workload.held)
        fixed = {knob.name: self._default(knob.name, knob.choices, held) for knob in space.knobs}
        knobs = space.applicable(fixed)
        if self.why_illegal(self.complete(knobs, task), task) is None:
            return knobs
        for knob in space.knobs:
            for choice in knob.choices if knob.name in self.facts.adjusts and knob.name not in held else ():
                other = space.applicable({**fixed, knob.name: choice})
                if self.why_illegal(self.complete(other, task), task) is None:
                    return other
        return knobs

    def _default(self, name: str, choices: tuple[KnobValue, ...], held: Settings) -> KnobValue:
        if name in held:
            return held[name]
        if name in self.equivalent_settings and all(other in held for other in self.equivalent_settings[name]):
            return None
        default = self.table.fields[name].default if name in self.table.fields else None
        # True == 1 in Python, so that types are compared too.
        return next((one for one in choices if (type(one), one) == (type(default), default)), choices[0])

    def lower_bound_candidate(self, candidate: Candidate, task: Task) -> Candidate | None:
        least = self.with_one_row(candidate.settings)
        if all(candidate.settings.get(name) == value for name, value in least.items()):
            return None
        return Candidate(knobs=candidate.knobs, settings={**candidate.settings, **least}, load=candidate.load)

    def launch(self, candidate: Candidate, task: Task, plan: ProbePlan | None = None) -> Launch:
        facts, settings = self.facts, dict(candidate.settings)
        files: dict[str, str] = {}
        if plan is not None:
            named, files = self._material(settings, task)
            counts = {name: self.table.count(settings, name) for name in self.table.fields}
            settings |= {**filled(facts.bounded, {**counts, "steps": probe_steps(plan)}), **named}
        elif task.workload.dataset is not None:
            settings |= self.data(task.workload.dataset)
        _, *words = shlex.split(facts.launcher)
        rendered = [word for line in self.arguments(settings, task) for word in shlex.split(line)]
        return Launch(
            argv=(str(task.workload.python), *words, *rendered), figures=self._figures(settings),
            environment=facts.environment if plan else {}, files=files, phases=facts.phases,
            effective=facts.reported_settings if plan else None,
        )  # fmt: skip

    def data(self, dataset: str) -> dict[str, KnobValue]:
        """Return the settings that name the user's data."""
        return dict(filled(self.facts.data, {"dataset": self.as_path(dataset)}))

    def as_path(self, path: str) -> str:
        """Return a path in the form that the framework's parser reads as this text."""
        return quoted(path) if self.facts.hydra else path

    def _material(self, settings: Settings, task: Task) -> tuple[dict[str, KnobValue], dict[str, str]]:
        """Return the settings for a probe's data and reward, and their files.

        The user's own dataset has priority."""
        facts = self.facts
        longest = self.lengths(settings)[0] - facts.prompt_overhead
        prompts = synthetic_prompts(self.table.count(settings, facts.rows), longest)
        rows = [filled(facts.row, {"prompt": prompt}) for prompt in prompts]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        files = {facts.rows_file: lines if facts.rows_file.endswith("l") else json.dumps(rows)}
        named = self.data(task.workload.dataset or f"{OUT}/{facts.rows_file}")
        if facts.reward is None or facts.reward_setting is None:
            return named, files
        return {**named, facts.reward_setting: f"{OUT}/reward.py"}, {"reward.py": facts.reward, **files}

    def _figures(self, settings: Settings) -> Figures:
        times = [self.table.count(settings, name) for name in self.facts.figures_times]
        return dataclasses.replace(self.facts.figures, times=math.prod(times)) if times else self.facts.figures

    def arguments(self, settings: Settings, task: Task) -> list[str]:
        """Return one command-line argument per setting, including the model."""
        named = {**dict.fromkeys(self.facts.model_settings, self.as_path(model_path(task))), **settings}
        shown = {name: value for name, value in named.items() if value is not None and name not in self.facts.own_settings}
        return [line for name, value in shown.items() if (line := self.argument(name, value))]

    def argument(self, name: str, value: KnobValue) -> str:
        return f"{name}={as_word(value) if isinstance(value, bool) else shlex.quote(str(value))}"

    def write_files(self, candidate: Candidate, task: Task, folder: Path, destination: Path | None = None) -> list[Path]:
        """Write the command line, one setting per line."""
        folder.mkdir(parents=True, exist_ok=True)
        data = self.data(task.workload.dataset) if task.workload.dataset is not None else {}
        lines = [self.facts.launcher, *self.arguments({**candidate.settings, **data}, task)]
        run = f"{self.method.upper()} with {self.name} for {task.workload.model.name} on {task.hardware}"
        basis = "measured" if task.hardware.basis == "measured" else f"{task.hardware.basis}, not measured"
        missing = "your reward" if data else "your data and your reward"
        head = comments([f"{run}: {basis}.", f"Written for {self.name} {self.table.version}. Add {missing}."])
        path = folder / "recommended.sh"
        path.write_text("#!/bin/sh\n" + head + " \\\n  ".join(lines) + ' "$@"\n', encoding="utf-8")
        path.chmod(0o755)
        return [path]

    def lora_rank(self, settings: Settings, task: Task) -> int:
        """Return the adapter's rank as given, or the default of --tuning."""
        given = settings.get(self.canonical["lora_r"])
        if isinstance(given, int):
            return given
        return 0 if task.workload.tuning == "full" else DEFAULT_LORA_RANK

    def lora_refusals(self, settings: Settings, task: Task) -> Iterator[str]:
        """Yield the conflicts of the adapter's rank with --tuning."""
        name = self.canonical["lora_r"]
        rank = self.table.count(settings, name)
        if task.workload.tuning == "full" and rank:
            yield f"{name}={rank} trains an adapter, and the tuning is full: add --tuning lora."
        if task.workload.tuning != "full" and not rank:
            yield f"{name}=0 trains all weights, and the tuning is LoRA: add --tuning full."

    def adapter_settings(self, settings: Settings) -> Mapping[str, object] | None:
        """Return the settings of the adapter in TRL's names; None: all weights are trained."""
        values = {name: self.table.value(settings, source) for name, source in self.facts.adapter.items()}
        return values if values.get("lora_r") else None

    def engine_settings(self, settings: Settings, **computed: int) -> EngineSettings:
        """Return the engine in a process of its own; `computed` overrides the facts."""
        found: dict[str, Any] = {"apart": True}
        for name, source in self.facts.engine.items():
            found[name] = ENGINE_READERS[name](self.table, settings, source) if isinstance(source, str) else source
        found["max_model_length"] = found["max_model_length"] or sum(self.lengths(settings))
        found["tensor_parallel"] = found["tensor_parallel"] or 1
        return EngineSettings(**{**found, **computed})

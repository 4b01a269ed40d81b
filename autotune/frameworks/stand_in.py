"""Frameworks that are predicted by a stand-in step, and measured by their own command line.

A subclass computes sizes and names the models of a step; its YAML file has everything else. This
module completes candidates from the settings table, checks legality, assembles the `StandInSpec`
and renders the command. It never imports the framework.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.core.composition import EngineSettings, SplitEngines
from autotune.core.files import TO_BE_RUN, comments, write_atomically
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate, Knobs, KnobValue, SearchSpace, fingerprint
from autotune.frameworks.base import (
    STAND_IN,
    Field,
    Settings,
    SettingsTable,
    as_word,
    model_path,
    other_global_batch,
    read_table,
)
from autotune.frameworks.framework_facts import (
    Lookup,
    StatedRule,
    StepBatch,
    filled,
    holds,
    read_facts,
    refuse_untraced,
    texts_that_apply,
)
from autotune.frameworks.launched_run import OUT, Launch, Launched, probe_steps, synthetic_prompts
from autotune.frameworks.stand_in_step import StandInSpec, served

TUNING = frozenset({"use_peft", "load_in_4bit"})
"""Held settings of TRL behind --tuning; stand-in frameworks read the workload instead."""

DEFAULT_LORA_RANK = 16

PLAIN_IN_HYDRA = re.compile(
    r"(?!(?:null|true|false|nan|inf)$)[a-z_/.~][\w/.:@+%~-]*", re.ASCII | re.IGNORECASE
)

READERS = {
    "float": SettingsTable.share,
    "int": SettingsTable.count,
    "bool": SettingsTable.truth,
    "str": SettingsTable.text,
    "CompletionSource": SettingsTable.text,
}


def _readers(cls: type[Any]) -> dict[str, Any]:
    """Return the reader of a setting for each plain field of a class."""
    kinds = {field.name: str(field.type).partition(" ")[0] for field in dataclasses.fields(cls)}
    return {name: READERS[kind] for name, kind in kinds.items() if kind in READERS}


ENGINE_READERS, STEP_READERS = _readers(EngineSettings), _readers(StandInSpec)


class StandIn(Launched):
    """Method of a framework that is predicted by a stand-in step. `NAME.yaml` has its facts."""

    trace_adapter = STAND_IN

    def __init__(self, name: str, method: str) -> None:
        facts = self.facts = read_facts(name)
        self.name, self.method, self.table = name, method, read_table(facts.table)
        self.space = f"{name}-{method}" if method != "grpo" else name
        self.needs, self.requires, self.watch = tuple(facts.requires), facts.requires, facts.watch
        self.canonical = facts.canonical
        batch = {} if facts.step_batch is None else {facts.step_batch.setting: ("global_batch",)}
        self.equivalent_settings = {**facts.equivalent_settings, **batch}

    @abstractmethod
    def derived(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        """Return the settings that the framework or the hardware determines unless they are
        given.
        """

    def lengths(self, settings: Settings) -> tuple[int, int]:
        """Return the longest prompt and completion."""
        flags = self.canonical
        return self.table.count(settings, flags["max_prompt_length"]), self.table.count(
            settings, flags["max_completion_length"]
        )

    @abstractmethod
    def sizes(self, settings: Settings, task: Task) -> dict[str, int]:
        """Return numbers that follow from settings and hardware.

        A number with the name of a field of `StandInSpec` becomes that field; rules in the YAML
        file may name every number. The settings may be illegal: a divisor must be at least 1.
        """

    @abstractmethod
    def composition(self, settings: Settings, task: Task) -> Mapping[str, Any]:
        """Return the fields of the `StandInSpec` that need more than a setting or a size."""

    def step(self, settings: Settings, task: Task) -> StandInSpec:
        """Assemble the specification: facts of the YAML file, then `sizes`, then `composition`."""
        sizes, (prompt, completion) = self.sizes(settings, task), self.lengths(settings)
        spec: dict[str, Any] = {
            "adapter": self.adapter_settings(settings),
            "prompt_length": prompt,
            "completion_length": completion,
        }
        for name, source in self.facts.step.items():
            spec[name] = (
                STEP_READERS[name](self.table, settings, source)
                if source in self.table.fields
                else source
            )
        spec |= {name: value for name, value in sizes.items() if name in STEP_READERS}
        return StandInSpec(
            **{
                **spec,
                **self.composition(settings, task),
                "notes": self._texts(self.facts.notes, settings, task),
            }
        )

    def _texts(
        self, rules: tuple[StatedRule, ...], settings: Settings, task: Task
    ) -> tuple[str, ...]:
        return tuple(texts_that_apply(rules, self.method, self._lookup(settings, task)))

    def _lookup(self, settings: Settings, task: Task) -> Lookup:
        """Return a function from a name in a rule to its value: a size, a given setting or its
        default.
        """
        longest, gpus = sum(self.lengths(settings)), task.hardware.count
        sizes: Settings = {
            "gpus": gpus,
            "longest": longest,
            "version": self.table.version,
            **self.sizes(settings, task),
        }

        def value_of(name: str) -> KnobValue:
            if name in sizes:
                return sizes[name]
            return (
                self.table.value(settings, name)
                if name in self.table.fields
                else settings.get(name)
            )

        return value_of

    def fields(self) -> Mapping[str, Field]:
        return self.table.fields

    def complete(self, knobs: Knobs, task: Task) -> Candidate:
        # 1. Given settings: held ones under both names, then knobs.
        held = task.workload.held
        given = {
            self.canonical.get(name, name): value
            for name, value in held.items()
            if name not in TUNING
        }
        given |= {name: value for name, value in held.items() if name in self.table.fields}
        given |= {name: value for name, value in knobs.items() if value is not None}
        settings: dict[str, KnobValue] = {
            name: value for name, value in given.items() if value is not None
        }
        refuse_untraced(self.facts.untraced, settings, self.name)
        # 2. Derived settings, then defaults. --global-batch is a number of completions.
        if (batch := self.facts.step_batch) is not None and task.workload.global_batch is not None:
            each, steps = self._completions_and_steps(batch, settings)
            settings.setdefault(batch.setting, task.workload.global_batch * steps // each)
        for name, value in self.derived(settings, task).items():
            settings.setdefault(name, value)
        for name in self.facts.core:
            settings.setdefault(name, self.table.value(settings, name))
        return Candidate(knobs=knobs, settings=settings, load=self.load_of(settings, task))

    def _completions_and_steps(self, batch: StepBatch, settings: Settings) -> tuple[int, int]:
        """Return the completions of each unit of the setting, and the optimizer steps that share
        them.
        """
        each = (
            self.table.count(settings, self.canonical["num_generations"])
            if batch.counts == "prompts"
            else 1
        )
        return max(1, each), max(1, self.table.count(settings, batch.steps) if batch.steps else 1)

    def load_of(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        """Return a load with all settings: the worker loads nothing before the command starts."""
        model = task.workload.model
        identity = {
            "model": model.name,
            "model_config": model.fingerprint,
            "settings": fingerprint(settings),
        }
        return {**identity, "ranks": 1, "device": task.hardware.kind}

    def refusals(self, settings: Settings, task: Task) -> Iterator[str]:
        # 1. Hardware, and settings that exist.
        if task.hardware.kind != "cuda":
            yield (
                f"{self.name} requires GPUs, and the request is for {task.hardware}: name some with"
                " --gpus, like --gpus 2xA100-80G. GPUs of another machine are predicted."
            )
            return
        if "sharding" in task.workload.held:
            yield (
                f"sharding belongs to TRL; for {self.name} see `autotune show knobs --space"
                f" {self.space}`."
            )
        for name in settings:
            if (
                name not in self.table.fields
                and name not in self.canonical
                and name not in self.facts.own_settings
            ):
                yield f"{name}: not a setting of {self.name} {self.table.version}."
        problems = [
            problem
            for name, value in settings.items()
            if (problem := self.table.problem(name, value))
        ]
        yield from problems
        if problems:
            return
        # 2. Tuning and the adapter's rank.
        facts, rank, tuning = self.facts, self.canonical.get("lora_r"), task.workload.tuning
        if tuning in facts.refused_tunings:
            yield facts.refused_tunings[tuning]
        elif rank is not None:
            if tuning == "full" and settings.get(rank):
                yield (
                    f"{rank}={settings[rank]} trains an adapter, and the tuning is full: add"
                    " --tuning lora."
                )
            if tuning != "full" and not settings.get(rank):
                yield f"{rank}=0 trains all weights, and the tuning is LoRA: add --tuning full."
        # 3. The framework's own rules.
        below = [
            f"{each}={settings.get(each)} is not above zero."
            for each in facts.positive
            if self.table.count(settings, each) < 1
        ]
        yield from below or self._texts(facts.rules, settings, task)
        if not below and (batch := facts.step_batch) is not None:
            (each, steps), value = (
                self._completions_and_steps(batch, settings),
                self.table.count(settings, batch.setting),
            )
            yield from other_global_batch(task, f"{batch.setting}={value}", value * each // steps)

    def baseline(self, space: SearchSpace, task: Task) -> Knobs:
        """Return the framework's defaults; knobs without a default take the least memory."""
        held = {
            self.canonical.get(name, name): value for name, value in task.workload.held.items()
        } | dict(task.workload.held)
        fixed = {knob.name: self._default(knob.name, knob.choices, held) for knob in space.knobs}
        knobs = space.applicable(fixed)
        if self.why_illegal(self.complete(knobs, task), task) is None:
            return knobs
        for knob in space.knobs:
            for choice in (
                knob.choices if knob.name in self.facts.adjusts and knob.name not in held else ()
            ):
                other = space.applicable({**fixed, knob.name: choice})
                if self.why_illegal(self.complete(other, task), task) is None:
                    return other
        return knobs

    def _default(self, name: str, choices: tuple[KnobValue, ...], held: Settings) -> KnobValue:
        if name in held:
            return held[name]
        if name in self.equivalent_settings and all(
            other in held for other in self.equivalent_settings[name]
        ):
            return None
        default = self.table.fields[name].default if name in self.table.fields else None
        # True == 1 in Python, so that types are compared too.
        return next(
            (one for one in choices if (type(one), one) == (type(default), default)), choices[0]
        )

    def lower_bound_candidate(self, candidate: Candidate, task: Task) -> Candidate | None:
        value_of = self._lookup(candidate.settings, task)
        rows = [row for row in self.facts.one_row if holds(row.when, value_of)]
        least = {
            name: value_of(value) if isinstance(value, str) else value
            for row in rows
            for name, value in row.settings.items()
        }
        if all(candidate.settings.get(name) == value for name, value in least.items()):
            return None
        return Candidate(
            knobs=candidate.knobs, settings={**candidate.settings, **least}, load=candidate.load
        )

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
        times = [self.table.count(settings, name) for name in facts.figures_times]
        return Launch(
            argv=(str(task.workload.python), *words, *rendered),
            figures=(
                dataclasses.replace(facts.figures, times=math.prod(times))
                if times
                else facts.figures
            ),
            environment=facts.environment if plan else {},
            files=files,
            phases=facts.phases,
            effective=facts.reported_settings if plan else None,
        )

    def data(self, dataset: str) -> dict[str, KnobValue]:
        """Return the settings that name the user's data."""
        return dict(filled(self.facts.data, {"dataset": self.as_path(dataset)}))

    def as_path(self, path: str) -> str:
        """Return a path in the form that the framework's parser reads as this text."""
        return quoted(path) if self.facts.hydra else path

    def _material(
        self, settings: Settings, task: Task
    ) -> tuple[dict[str, KnobValue], dict[str, str]]:
        """Return the settings for a probe's data and reward, and their files. The user's own
        dataset has priority.
        """
        facts = self.facts
        longest = self.lengths(settings)[0] - facts.prompt_overhead
        prompts = synthetic_prompts(self.table.count(settings, facts.rows), longest)
        rows = [filled(facts.row, {"prompt": prompt}) for prompt in prompts]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        files = {facts.rows_file: lines if facts.rows_file.endswith("l") else json.dumps(rows)}
        named = self.data(task.workload.dataset or f"{OUT}/{facts.rows_file}")
        if facts.reward is None or facts.reward_setting is None:
            return named, files
        return {**named, facts.reward_setting: f"{OUT}/reward.py"}, {
            "reward.py": facts.reward,
            **files,
        }

    def arguments(self, settings: Settings, task: Task) -> list[str]:
        """Return one command-line argument per setting, including the model."""
        named = {
            **dict.fromkeys(self.facts.model_settings, self.as_path(model_path(task))),
            **settings,
        }
        shown = {
            name: value
            for name, value in named.items()
            if value is not None and name not in self.facts.own_settings
        }
        return [line for name, value in shown.items() if (line := self.argument(name, value))]

    def argument(self, name: str, value: KnobValue) -> str:
        return f"{name}={shlex.quote(as_word(value))}"

    def write_files(
        self, candidate: Candidate, task: Task, folder: Path, destination: Path | None = None
    ) -> list[Path]:
        """Write the command line, one setting per line."""
        folder.mkdir(parents=True, exist_ok=True)
        data = self.data(task.workload.dataset) if task.workload.dataset is not None else {}
        lines = [self.facts.launcher, *self.arguments({**candidate.settings, **data}, task)]
        missing = "your reward" if data else "your data and your reward"
        head = comments(
            [self.title(task), f"Written for {self.name} {self.table.version}. Add {missing}."]
        )
        path = folder / "recommended.sh"
        write_atomically(
            path,
            ("#!/bin/sh\n" + head + " \\\n  ".join(lines) + ' "$@"\n').encode(),
            mode=TO_BE_RUN,
        )
        return [path]

    def title(self, task: Task) -> str:
        """Return the first line of a written file."""
        basis = (
            "measured"
            if task.hardware.basis == "measured"
            else f"{task.hardware.basis}, not measured"
        )
        return (
            f"{self.method.upper()} with {self.name} for {task.workload.model.name} on"
            f" {task.hardware}: {basis}."
        )

    def lora_rank(self, settings: Settings, task: Task) -> int:
        """Return the adapter's rank as given, or the default of --tuning."""
        given = settings.get(self.canonical["lora_r"])
        if isinstance(given, int):
            return given
        return 0 if task.workload.tuning == "full" else DEFAULT_LORA_RANK

    def adapter_settings(self, settings: Settings) -> Mapping[str, object] | None:
        """Return the settings of the adapter in TRL's names; None: all weights are trained."""
        values = {
            name: self.table.value(settings, source) for name, source in self.facts.adapter.items()
        }
        return values if values.get("lora_r") else None

    def engine_settings(self, settings: Settings, **computed: int) -> EngineSettings:
        """Return the engine in a process of its own; `computed` overrides the facts."""
        found: dict[str, Any] = {"apart": True}
        for name, source in self.facts.engine.items():
            found[name] = (
                ENGINE_READERS[name](self.table, settings, source)
                if isinstance(source, str)
                else source
            )
        found["max_model_length"] = found["max_model_length"] or sum(self.lengths(settings))
        found["tensor_parallel"] = found["tensor_parallel"] or 1
        return EngineSettings(**{**found, **computed})

    def server(self, settings: Settings, task: Task, gpus: int, **schedule: Any) -> SplitEngines:
        """Return servers with vLLM's defaults on GPUs of their own; `schedule`: how they overlap
        with training.
        """
        parallel, share = self.facts.engine["tensor_parallel"], self.facts.engine["utilization"]
        return served(
            task.hardware,
            gpus=gpus,
            tensor_parallel=self.table.count(settings, str(parallel)),
            dtype="bfloat16",
            window=sum(self.lengths(settings)),
            utilization=self.table.share(settings, str(share)),
            **schedule,
        )

    def engines_apart(self, settings: Settings, gpus: int, **schedule: Any) -> SplitEngines:
        """Return engines on GPUs of their own; `schedule`: how they overlap with training."""
        engine = dataclasses.replace(self.engine_settings(settings), sleep=False)
        return SplitEngines(gpus=gpus, engine=engine, dtype="bfloat16", **schedule)


# Strings in the grammar of Hydra's command line, which a shell's quotes do not protect.


def without_references(text: str) -> str:
    """Return the text for OmegaConf, which replaces `${...}` by another setting's value."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def quoted(text: str) -> str:
    """Return the text as a string for Hydra; plain paths stay as they are.

    In quotes, a backslash is an escape before a quote only."""
    if PLAIN_IN_HYDRA.fullmatch(text):
        return text
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", without_references(text))
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"

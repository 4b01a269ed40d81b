"""Frameworks that are predicted by a stand-in step, and measured by their own command line.

A subclass computes sizes and names the models of a step; its YAML file has everything else. This
module completes candidates from the settings table, checks legality, assembles the `StandInSpec`
and renders the command. It never imports the framework.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.core.composition import EngineSettings, SplitEngines
from autotune.core.files import TO_BE_RUN, comments, write_atomically
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate, Knob, Knobs, KnobValue, SearchSpace, fingerprint
from autotune.frameworks.base import (
    STAND_IN,
    Field,
    Settings,
    Values,
    as_word,
    model_path,
    other_global_batch,
    read_table,
)
from autotune.frameworks.framework_facts import StepBatch, filled, read_facts
from autotune.frameworks.hydra_strings import quoted
from autotune.frameworks.launched_run import (
    OUT,
    Figures,
    Launch,
    Launched,
    probe_steps,
    synthetic_prompts,
)
from autotune.frameworks.rules import (
    Lookup,
    StatedRule,
    holds,
    refuse_untraced,
    texts_that_apply,
)
from autotune.frameworks.stand_in_step import SpecFields, StandInSpec, served

TUNING = frozenset({"use_peft", "load_in_4bit"})
"""Held settings of TRL behind --tuning; stand-in frameworks read the workload instead."""

DEFAULT_LORA_RANK = 16

Reader = Callable[[Values, str], KnobValue]
"""Reads the value of a setting in the type of the field that it becomes."""

READERS: Mapping[str, Reader] = {
    "float": Values.fraction,
    "int": Values.count,
    "bool": Values.is_on,
    "str": Values.text,
    "CompletionSource": Values.text,
}


def _readers(cls: type[Any]) -> dict[str, Reader]:
    """Return the reader of a setting for each plain field of a class."""
    readers = {}
    for field in dataclasses.fields(cls):
        type_name = str(field.type).partition(" ")[0]  # `int` of `int | None`
        if type_name in READERS:
            readers[field.name] = READERS[type_name]
    return readers


ENGINE_READERS = _readers(EngineSettings)
STEP_READERS = _readers(StandInSpec)


class StandIn(Launched):
    """Method of a framework that is predicted by a stand-in step. `NAME.yaml` has its facts."""

    trace_adapter = STAND_IN

    def __init__(self, name: str, method: str) -> None:
        facts = read_facts(name)
        equivalent_settings = dict(facts.equivalent_settings)
        if facts.step_batch is not None:
            equivalent_settings[facts.step_batch.setting] = ("global_batch",)
        self.facts = facts
        self.name = name
        self.method = method
        self.table = read_table(facts.table)
        self.space = name if method == "grpo" else f"{name}-{method}"
        self.needs = tuple(facts.requires)
        self.requires = facts.requires
        self.watch = facts.watch
        self.resuming = facts.resuming
        self.canonical = facts.canonical
        self.release = self.table.version
        self.decides_memory = facts.core
        self.equivalent_settings = equivalent_settings

    # What a framework's file adds.

    @abstractmethod
    def derived(self, values: Values, task: Task) -> Settings:
        """Return the settings that the framework or the hardware determines unless they are
        stated.
        """

    def lengths(self, values: Values) -> tuple[int, int]:
        """Return the longest prompt and completion."""
        prompt = values.count(self.canonical["max_prompt_length"])
        return prompt, values.count(self.canonical["max_completion_length"])

    @abstractmethod
    def sizes(self, values: Values, task: Task) -> dict[str, int]:
        """Return numbers that follow from settings and hardware.

        A number with the name of a field of `StandInSpec` becomes that field; rules in the YAML
        file may name every number. The settings may be illegal: a divisor must be at least 1.
        """

    @abstractmethod
    def composition(self, values: Values, task: Task) -> SpecFields:
        """Return the fields of the `StandInSpec` that need more than a setting or a size."""

    def argument(self, name: str, value: KnobValue) -> str:
        """Return the words of the command line for one setting; empty: none."""
        return f"{name}={shlex.quote(as_word(value))}"

    def as_path(self, path: str) -> str:
        """Return a path in the form that the framework's parser reads as this text."""
        return quoted(path) if self.facts.hydra else path

    # Candidates.

    def fields(self) -> Mapping[str, Field]:
        return self.table.fields

    def values(self, settings: Settings) -> Values:
        return Values(self.table, settings)

    def complete(self, knobs: Knobs, task: Task) -> Candidate:
        settings = self._stated(knobs, task)
        values = self.values(settings)
        refuse_untraced(self.facts.untraced, settings, self.name, self.method)

        # --global-batch is a number of completions.
        batch = self.facts.step_batch
        completions = task.workload.global_batch
        if batch is not None and completions is not None:
            unit, steps = self._unit_and_steps(batch, values)
            settings.setdefault(batch.setting, completions * steps // unit)
        for name, value in self.derived(values, task).items():
            settings.setdefault(name, value)
        for name in self.facts.core:
            settings.setdefault(name, values.value(name))
        return Candidate(
            knobs=knobs,
            settings=settings,
            load=self.load_of(settings, task),
        )

    def _stated(self, knobs: Knobs, task: Task) -> dict[str, KnobValue]:
        """Return the held settings and the knobs under the framework's names.

        A setting that is held under both names has the value of the framework's own."""
        stated: dict[str, KnobValue] = {}
        for name, value in task.workload.held_values.items():
            if name not in TUNING:
                stated[self.canonical.get(name, name)] = value
        for name, value in task.workload.held_values.items():
            if name in self.table.fields:
                stated[name] = value
        for name, value in knobs.items():
            if value is not None:
                stated[name] = value
        return {name: value for name, value in stated.items() if value is not None}

    def _unit_and_steps(self, batch: StepBatch, values: Values) -> tuple[int, int]:
        """Return the completions of each unit of the setting, and the optimizer steps that share
        them.
        """
        unit = 1
        steps = 1
        if batch.counts == "prompts":
            unit = values.count(self.canonical["num_generations"])
        if batch.steps is not None:
            steps = values.count(batch.steps)
        return max(1, unit), max(1, steps)

    def load_of(self, settings: Settings, task: Task) -> dict[str, KnobValue]:
        """Return a load with all settings: the worker loads nothing before the command starts."""
        model = task.workload.model
        return {
            "model": model.name,
            "model_config": model.fingerprint,
            "settings": fingerprint(settings),
            "ranks": 1,
            "device": task.hardware.kind,
        }

    def baseline(self, space: SearchSpace, task: Task) -> Knobs:
        """Return the framework's defaults; knobs without a default take the least memory."""
        fixed: dict[str, KnobValue] = {}
        for name, value in task.workload.held_values.items():
            fixed[self.canonical.get(name, name)] = value
        fixed |= task.workload.held_values
        defaults = {knob.name: self._default(knob, fixed, task) for knob in space.knobs}
        knobs = space.applicable(defaults)
        if task.workload.launch is not None or self.is_legal(knobs, task):
            return knobs

        for knob in space.knobs:
            if knob.name not in self.facts.adjusts or knob.name in fixed:
                continue
            for choice in knob.choices:
                adjusted = space.applicable({**defaults, knob.name: choice})
                if self.is_legal(adjusted, task):
                    return adjusted
        return knobs

    def _default(
        self,
        knob: Knob,
        fixed: Settings,
        task: Task,
    ) -> KnobValue:
        if knob.name in fixed:
            return fixed[knob.name]
        if self.is_implied(knob.name, fixed):
            return None
        default = None
        if knob.name in self.table.fields:
            default = self.table.fields[knob.name].default
        if task.workload.launch is not None and knob.name in self.table.fields:
            return self.table.default_of(knob.name)
        for choice in knob.choices:
            # True == 1 in Python, so that types are compared too.
            if type(choice) is type(default) and choice == default:
                return choice
        return knob.choices[0]

    def lower_bound_candidate(self, candidate: Candidate, task: Task) -> Candidate | None:
        value_of = self._lookup(candidate.settings, task)
        one_row: dict[str, KnobValue] = {}
        for row in self.facts.one_row:
            if holds(row.when, value_of):
                for name, value in row.settings.items():
                    one_row[name] = value_of(value) if isinstance(value, str) else value
        if all(candidate.settings.get(name) == value for name, value in one_row.items()):
            return None
        return dataclasses.replace(candidate, settings={**candidate.settings, **one_row})

    # Legality.

    def refusals(self, settings: Settings, task: Task) -> Iterator[str]:
        # 1. Hardware, and settings that exist.
        if task.hardware.kind != "cuda":
            yield (
                f"{self.name} requires GPUs, and the request is for {task.hardware}: name some with"
                " --gpus, like --gpus 2xA100-80G. GPUs of another machine are predicted."
            )
            return
        if "sharding" in task.workload.held_values:
            yield (
                f"sharding belongs to TRL; for {self.name} see `autotune show knobs --space"
                f" {self.space}`."
            )
        accepted = {*self.table.fields, *self.canonical, *self.facts.own_settings}
        for name in settings:
            if name not in accepted:
                yield f"{name}: not a setting of {self.name} {self.table.version}."

        # 2. Values of the right types; the rules below expect them.
        problems = [self.table.problem(name, value) for name, value in settings.items()]
        for problem in problems:
            if problem is not None:
                yield problem
        if any(problems):
            return

        # 3. Tuning, then the framework's own rules.
        yield from self._tuning_refusals(settings, task)
        yield from self._rule_refusals(settings, task)

    def _tuning_refusals(self, settings: Settings, task: Task) -> Iterator[str]:
        tuning = task.workload.tuning
        if tuning in self.facts.refused_tunings:
            yield self.facts.refused_tunings[tuning]
            return
        rank = self.canonical.get("lora_r")
        if rank is None:
            return
        if tuning == "full" and settings.get(rank):
            yield (
                f"{rank}={settings[rank]} trains an adapter, and the tuning is full: add"
                " --tuning lora."
            )
        if tuning != "full" and not settings.get(rank):
            yield f"{rank}=0 trains all weights, and the tuning is LoRA: add --tuning full."

    def _rule_refusals(self, settings: Settings, task: Task) -> Iterator[str]:
        values = self.values(settings)
        not_positive = [name for name in self.facts.positive if values.count(name) < 1]
        for name in not_positive:
            yield f"{name}={settings.get(name)} is not above zero."
        if not_positive:
            return
        yield from self._texts(self.facts.rules, settings, task)
        batch = self.facts.step_batch
        if batch is not None:
            unit, steps = self._unit_and_steps(batch, values)
            value = values.count(batch.setting)
            product = f"{batch.setting}={value}"
            yield from other_global_batch(task, product, value * unit // steps)

    def _texts(
        self,
        rules: tuple[StatedRule, ...],
        settings: Settings,
        task: Task,
    ) -> tuple[str, ...]:
        return tuple(texts_that_apply(rules, self.method, self._lookup(settings, task)))

    def _lookup(self, settings: Settings, task: Task) -> Lookup:
        """Return a function from a name in a rule to its value: a size, a stated setting or its
        default.
        """
        values = self.values(settings)
        sizes: Settings = {
            "gpus": task.hardware.count,
            "longest": sum(self.lengths(values)),
            "version": self.table.version,
            **self.sizes(values, task),
        }

        def value_of(name: str) -> KnobValue:
            if name in sizes:
                return sizes[name]
            if name in self.table.fields:
                return values.value(name)
            return settings.get(name)

        return value_of

    # The stand-in step.

    def step(self, settings: Settings, task: Task) -> StandInSpec:
        """Assemble the specification: facts of the YAML file, then `sizes`, then `composition`."""
        values = self.values(settings)
        prompt, completion = self.lengths(values)
        spec: dict[str, Any] = {
            "adapter": self.adapter_settings(values),
            "prompt_length": prompt,
            "completion_length": completion,
        }
        for name, source in self.facts.step.items():
            if isinstance(source, str) and source in self.table.fields:
                spec[name] = STEP_READERS[name](values, source)
            else:
                spec[name] = source
        for name, size in self.sizes(values, task).items():
            if name in STEP_READERS:
                spec[name] = size
        spec |= self.composition(values, task)
        spec["notes"] = self._texts(self.facts.notes, settings, task)
        return StandInSpec(**spec)

    def lora_rank(self, values: Values, task: Task) -> int:
        """Return the adapter's rank as stated, or the default of --tuning."""
        stated = values.settings.get(self.canonical["lora_r"])
        if isinstance(stated, int):
            return stated
        return 0 if task.workload.tuning == "full" else DEFAULT_LORA_RANK

    def adapter_settings(self, values: Values) -> Mapping[str, object] | None:
        """Return the settings of the adapter in TRL's names; None: all weights are trained."""
        adapter = {name: values.value(source) for name, source in self.facts.adapter.items()}
        return adapter if adapter.get("lora_r") else None

    def engine_settings(self, values: Values, **computed: int) -> EngineSettings:
        """Return the engine in a process of its own; `computed` overrides the facts."""
        engine: dict[str, Any] = {"apart": True}
        for name, source in self.facts.engine.items():
            if isinstance(source, str):
                engine[name] = ENGINE_READERS[name](values, source)
            else:
                engine[name] = source
        engine["max_model_length"] = engine["max_model_length"] or sum(self.lengths(values))
        engine["tensor_parallel"] = engine["tensor_parallel"] or 1
        return EngineSettings(**{**engine, **computed})

    def server(self, values: Values, task: Task, gpus: int, **schedule: Any) -> SplitEngines:
        """Return servers with vLLM's defaults on GPUs of their own; `schedule`: how they overlap
        with training.
        """
        return served(
            task.hardware,
            gpus=gpus,
            tensor_parallel=values.count(str(self.facts.engine["tensor_parallel"])),
            dtype="bfloat16",
            window=sum(self.lengths(values)),
            utilization=values.fraction(str(self.facts.engine["utilization"])),
            **schedule,
        )

    def engines_apart(self, values: Values, gpus: int, **schedule: Any) -> SplitEngines:
        """Return engines on GPUs of their own; `schedule`: how they overlap with training."""
        engine = dataclasses.replace(self.engine_settings(values), sleep=False)
        return SplitEngines(
            gpus=gpus,
            engine=engine,
            dtype="bfloat16",
            **schedule,
        )

    # The run.

    def launch(
        self,
        candidate: Candidate,
        task: Task,
        plan: ProbePlan | None = None,
    ) -> Launch:
        facts = self.facts
        # 1. Settings and files: a probe has bounds, and synthetic rows without a dataset.
        settings = dict(candidate.settings)
        files: dict[str, str] = {}
        environment: Mapping[str, str] = {}
        reported_settings = None
        if plan is not None:
            environment = facts.environment
            reported_settings = facts.reported_settings
            files = self._probe_files(candidate.settings)
            settings |= self._bounds(candidate.settings, plan)
            settings |= self.data(task.workload.dataset or f"{OUT}/{facts.rows_file}")
            if facts.reward_setting is not None and "reward.py" in files:
                settings[facts.reward_setting] = f"{OUT}/reward.py"
        elif task.workload.dataset is not None:
            settings |= self.data(task.workload.dataset)

        # 2. The command: the launcher under the user's interpreter, and a word per setting.
        _, *launcher = shlex.split(facts.launcher)
        arguments: list[str] = []
        for line in self.arguments(settings, task):
            arguments += shlex.split(line)
        return Launch(
            argv=(str(task.workload.python), *launcher, *arguments),
            figures=self._figures(settings),
            environment=environment,
            files=files,
            phases=facts.phases,
            effective=reported_settings,
        )

    def _figures(self, settings: Settings) -> Figures:
        """Return the source of the speed; settings may be a factor on the reported tokens."""
        facts = self.facts
        if not facts.figures_times:
            return facts.figures
        values = self.values(settings)
        times = math.prod(values.count(name) for name in facts.figures_times)
        return dataclasses.replace(facts.figures, times=times)

    def _bounds(self, settings: Settings, plan: ProbePlan) -> dict[str, KnobValue]:
        """Return the settings by which a probe ends early and saves nothing."""
        values = self.values(settings)
        counts = {name: values.count(name) for name in self.table.fields}
        return dict(filled(self.facts.bounded, {**counts, "steps": probe_steps(plan)}))

    def _probe_files(self, settings: Settings) -> dict[str, str]:
        """Return the synthetic rows and reward of a probe; the user's dataset has priority."""
        facts = self.facts
        values = self.values(settings)
        longest_prompt, _ = self.lengths(values)
        prompts = synthetic_prompts(
            values.count(facts.rows), longest_prompt - facts.prompt_overhead
        )
        rows = [filled(facts.row, {"prompt": prompt}) for prompt in prompts]
        text = json.dumps(rows)
        if facts.rows_file.endswith(".jsonl"):
            text = "".join(f"{json.dumps(row)}\n" for row in rows)
        if facts.reward is None or facts.reward_setting is None:
            return {facts.rows_file: text}
        return {"reward.py": facts.reward, facts.rows_file: text}

    def data(self, dataset: str) -> dict[str, KnobValue]:
        """Return the settings that name the user's data."""
        return dict(filled(self.facts.data, {"dataset": self.as_path(dataset)}))

    def arguments(self, settings: Settings, task: Task) -> list[str]:
        """Return one command-line argument per setting, including the model."""
        model = self.as_path(model_path(task))
        stated = {**dict.fromkeys(self.facts.model_settings, model), **settings}
        arguments = []
        for name, value in stated.items():
            if value is None or name in self.facts.own_settings:
                continue
            argument = self.argument(name, value)
            if argument:
                arguments.append(argument)
        return arguments

    def write_files(
        self,
        candidate: Candidate,
        task: Task,
        folder: Path,
        destination: Path | None = None,
    ) -> list[Path]:
        """Write the command line, one setting per line."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = dict(candidate.settings)
        missing = "your data and your reward"
        if task.workload.dataset is not None:
            settings |= self.data(task.workload.dataset)
            missing = "your reward"
        written_for = f"Written for {self.name} {self.table.version}. Add {missing}."
        head = comments([self.title(task), written_for])
        lines = [self.facts.launcher, *self.arguments(settings, task)]
        command = " \\\n  ".join(lines)
        path = folder / "recommended.sh"
        script = f'#!/bin/sh\n{head}{command} "$@"\n'
        write_atomically(path, script.encode(), mode=TO_BE_RUN)
        return [path]

    def title(self, task: Task) -> str:
        """Return the first line of a written file."""
        basis: str = task.hardware.basis
        if basis != "measured":
            basis = f"{basis}, not measured"
        return (
            f"{self.method.upper()} with {self.name} for {task.workload.model.name} on"
            f" {task.hardware}: {basis}."
        )

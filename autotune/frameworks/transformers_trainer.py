"""Frameworks whose trainers derive from those of transformers: ms-swift and unsloth.

Their settings have the names of transformers' arguments, and a YAML file lists those that a
candidate states. A subclass renders the run and names the models of a step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.core.job import Task
from autotune.core.space import Candidate, Knobs
from autotune.core.yaml_document import packaged_table
from autotune.frameworks.base import (
    ACCUMULATION,
    KINDS,
    MICRO_BATCH,
    STAND_IN,
    Field,
    Settings,
    as_word,
    count_of,
    other_global_batch,
)
from autotune.frameworks.framework_facts import TrainerFacts
from autotune.frameworks.launched_run import OF_TRANSFORMERS, OUT, Figures, Launched
from autotune.frameworks.rules import StatedRule, holds, refuse_untraced, texts_that_apply
from autotune.frameworks.stand_in_step import LAYER_PARTS, SpecFields, StandInSpec

GENERATION_BATCH = "generation_batch_size"
GENERATION_STEPS = "steps_per_generation"
N_SYNTHETIC_ROWS = 512


class TransformersTrainer(Launched):
    """Method of a framework over transformers' trainers."""

    trace_adapter = STAND_IN
    watch = OF_TRANSFORMERS
    measures_rows = True
    batch_is_per_gpu = True
    equivalent_settings: Mapping[str, tuple[str, ...]] = {ACCUMULATION: ("global_batch",)}

    def __init__(self, method: str) -> None:
        self.facts = packaged_table("autotune.frameworks", f"{self.name}.yaml", TrainerFacts)
        self.method = method
        self.online = method == "grpo"
        self.space = f"{self.name}-{method}"
        common_defaults = self.facts.defaults["common"]
        self.defaults = {**common_defaults, **self.facts.defaults[method]}
        self.canonical = self.facts.canonical[method]
        self.requires = self.facts.requires
        self.release = self.facts.version
        self.assumed_defaults = self.facts.assumed_defaults
        self.decides_memory = self.facts.decides_memory.get(method, ())
        self.needs = tuple(self.facts.requires)
        self.resuming = self.facts.resuming

    @abstractmethod
    def lengths(self, settings: Settings) -> tuple[int, int]:
        """Return the longest prompt and completion."""

    @abstractmethod
    def composition(self, settings: Settings, task: Task) -> SpecFields:
        """Return the fields of the `StandInSpec` that differ between frameworks."""

    def derived(self, settings: Settings, task: Task) -> Settings:
        """Return the settings that others or the hardware determine."""
        return {}

    def fields(self) -> Mapping[str, Field]:
        """Return the settings that a candidate states, and those that are refused by name."""
        fields: dict[str, Field] = {}
        for row in self.facts.untraced:
            default = row.modelled[-1]
            kind = "str"
            if default is not None:
                kind = KINDS[type(default)]
            for name in row.settings:
                fields[name] = Field(kinds=(kind, "null"), default=default)
        return fields | dict(super().fields())

    def complete(self, knobs: Knobs, task: Task) -> Candidate:
        refuse_untraced(self.facts.untraced, task.workload.held_values, self.name, self.method)
        # 1. Stated settings, then defaults and derived ones.
        implied = self.facts.implied[task.workload.tuning]
        stated = {**implied, **self.held_settings(task), **knobs}
        settings = {**self.defaults, **stated}
        settings |= self.derived(settings, task)

        # 2. The accumulation that makes the requested global batch.
        if stated.get(ACCUMULATION) is None and task.workload.global_batch:
            steps = task.workload.global_batch // self._rows(settings, task)
            settings[ACCUMULATION] = max(1, steps)

        # 3. Settings without effect would tell equal candidates apart.
        unread: set[str] = set()
        for row in self.facts.unread:
            if holds(row.when, settings.get):
                unread.update(row.settings)
        effective = {name: value for name, value in settings.items() if name not in unread}
        return Candidate(
            knobs=knobs,
            settings=effective,
            load=self.load_of(effective, task),
        )

    def _rows(self, settings: Settings, task: Task) -> int:
        """Return the rows of one micro-step over all GPUs."""
        ranks = self.ranks(settings, task.hardware.count)
        return max(1, count_of(settings, MICRO_BATCH) * ranks)

    def total_rows(self, settings: Settings, task: Task) -> int:
        """Return the rows of one optimizer step, which are generated together."""
        return self._rows(settings, task) * count_of(settings, ACCUMULATION)

    def generated_rows(self, settings: Settings, task: Task) -> int:
        """Return the rows that are generated at a time: those of one optimizer step, unless
        settings of TRL's GRPO state another number.
        """
        stated = count_of(settings, GENERATION_BATCH)
        micro_steps = count_of(settings, GENERATION_STEPS)
        if stated or not micro_steps:
            return stated or self.total_rows(settings, task)
        return self._rows(settings, task) * micro_steps

    def refusals(self, settings: Settings, task: Task) -> Iterator[str]:
        for name, choices in self.facts.choices.items():
            if settings.get(name) not in choices:
                listed = ", ".join(map(as_word, choices))
                yield f"{name} must be one of {listed}, and is {settings.get(name)!r}."
        yield from self._texts(self.facts.rules, settings, task)
        total = self.total_rows(settings, task)
        yield from other_global_batch(task, self.facts.batch_factors, total)

    def _texts(
        self,
        rules: tuple[StatedRule, ...],
        settings: Settings,
        task: Task,
    ) -> Iterator[str]:
        values = {
            **settings,
            "device": task.hardware.kind,
            "gpus": task.hardware.count,
            "hardware": str(task.hardware),
            "version": self.facts.version,
            "total": self.total_rows(settings, task),
            **self.conditions(settings),
            "generated": self.generated_rows(settings, task),
        }
        return texts_that_apply(rules, self.method, values.get)

    def conditions(self, settings: Settings) -> Settings:
        """Return what rules and notes may ask besides the settings."""
        return {}

    def figures(
        self,
        settings: Settings,
        task: Task,
        file: str,
        tokens_so_far: str,
    ) -> Figures:
        """Return the source of tokens in a log of JSON lines; seconds are the time between two
        lines.
        """
        log = f"{OUT}/{file}"
        if not self.online:
            return Figures(
                kind="json",
                file=log,
                keys={"tokens_so_far": (tokens_so_far,)},
            )
        return Figures(
            kind="json",
            file=log,
            keys={"tokens": ("completions/mean_length",)},
            times=self.total_rows(settings, task),
        )

    def step(self, settings: Settings, task: Task) -> StandInSpec:
        prompt, completion = self.lengths(settings)
        ranks = self.ranks(settings, task.hardware.count)
        micro_batch = count_of(settings, MICRO_BATCH)
        accumulation = count_of(settings, ACCUMULATION) or 1
        spec: dict[str, Any] = {
            "prompt_length": prompt,
            "completion_length": completion,
            "tokens": micro_batch * (prompt + completion),
            "score_tokens": micro_batch * (prompt + completion),
            "micro_batch": micro_batch,
            "accumulation": accumulation,
            "ranks": ranks,
            "optimizer": str(settings.get("optim")),
            "notes": tuple(self._texts(self.facts.notes, settings, task)),
        }
        if self.online:
            spec["generation_batch"] = self.generated_rows(settings, task)
            spec["loss"] = "logprobs_plain"
            spec["loss_options"] = {"completion_alone": True}
        else:
            spec["generation_batch"] = 0
            spec["loss"] = "causal_lm"
            spec["same_code_parts"] = (*LAYER_PARTS, "logits")
        spec |= self.composition(settings, task)
        return StandInSpec(**spec)

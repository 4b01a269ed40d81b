"""Frameworks whose trainers derive from those of transformers: ms-swift and unsloth.

Their settings have the names of transformers' arguments, and a YAML file lists those that a
candidate states. A subclass renders the run and names the models of a step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.core.job import Task
from autotune.core.space import Candidate, Knobs, KnobValue
from autotune.core.yaml_document import packaged_table
from autotune.frameworks.base import (
    KINDS,
    STAND_IN,
    Field,
    Settings,
    as_word,
    count_of,
    other_global_batch,
)
from autotune.frameworks.framework_facts import (
    StatedRule,
    TrainerFacts,
    holds,
    refuse_untraced,
    texts_that_apply,
)
from autotune.frameworks.launched_run import OF_TRANSFORMERS, OUT, Figures, Launched
from autotune.frameworks.stand_in_step import StandInSpec

N_SYNTHETIC_ROWS = 512


class TransformersTrainer(Launched):
    """Method of a framework over transformers' trainers."""

    trace_adapter = STAND_IN
    watch = OF_TRANSFORMERS
    measures_rows = True
    equivalent_settings: Mapping[str, tuple[str, ...]] = {
        "gradient_accumulation_steps": ("global_batch",)
    }

    def __init__(self, method: str) -> None:
        facts = self.facts = packaged_table(
            "autotune.frameworks", f"{self.name}.yaml", TrainerFacts
        )
        self.method, self.online, self.space = method, method == "grpo", f"{self.name}-{method}"
        self.defaults = {**facts.defaults["common"], **facts.defaults[method]}
        self.canonical, self.requires, self.needs = (
            facts.canonical[method],
            facts.requires,
            tuple(facts.requires),
        )

    def fields(self) -> Mapping[str, Field]:
        plain = {name: row.modelled[-1] for row in self.facts.untraced for name in row.settings}
        kinds = {
            name: "str" if value is None else KINDS[type(value)] for name, value in plain.items()
        }
        unmodelled = {
            name: Field(kinds=(kind, "null"), default=plain[name]) for name, kind in kinds.items()
        }
        return {**unmodelled, **super().fields()}

    @abstractmethod
    def lengths(self, settings: Settings) -> tuple[int, int]:
        """Return the longest prompt and completion."""

    @abstractmethod
    def composition(self, settings: Settings, task: Task) -> Mapping[str, Any]:
        """Return the fields of the `StandInSpec` that are the framework's own."""

    def derived(self, settings: Settings, task: Task) -> Mapping[str, KnobValue]:
        """Return the settings that others or the hardware determine."""
        return {}

    def complete(self, knobs: Knobs, task: Task) -> Candidate:
        refuse_untraced(self.facts.untraced, task.workload.held, self.name)
        given = {**self.facts.implied[task.workload.tuning], **self.held(task), **knobs}
        settings = {**self.defaults, **given}
        settings |= self.derived(settings, task)
        if "gradient_accumulation_steps" not in given and task.workload.global_batch:
            settings["gradient_accumulation_steps"] = max(
                1, task.workload.global_batch // self._rows(settings, task)
            )
        unread = {
            name
            for row in self.facts.unread
            if holds(row.when, settings.get)
            for name in row.settings
        }
        effective = {name: value for name, value in settings.items() if name not in unread}
        return Candidate(knobs=knobs, settings=effective, load=self.load_of(effective, task))

    def _rows(self, settings: Settings, task: Task) -> int:
        """Return the rows of one micro-step over all GPUs."""
        return max(
            1,
            count_of(settings, "per_device_train_batch_size")
            * self.ranks(settings, task.hardware.count),
        )

    def total_rows(self, settings: Settings, task: Task) -> int:
        """Return the rows of one optimizer step, which are generated together."""
        return self._rows(settings, task) * count_of(settings, "gradient_accumulation_steps")

    def refusals(self, settings: Settings, task: Task) -> Iterator[str]:
        for name, choices in self.facts.choices.items():
            if settings.get(name) not in choices:
                yield (
                    f"{name} must be one of {', '.join(map(as_word, choices))}, and is"
                    f" {settings.get(name)!r}."
                )
        yield from self._texts(self.facts.rules, settings, task)
        yield from other_global_batch(
            task, self.facts.batch_factors, self.total_rows(settings, task)
        )

    def _texts(
        self, rules: tuple[StatedRule, ...], settings: Settings, task: Task
    ) -> Iterator[str]:
        facts: Settings = {
            "device": task.hardware.kind,
            "gpus": task.hardware.count,
            "hardware": str(task.hardware),
        }
        facts = {
            **settings,
            **facts,
            "version": self.facts.version,
            "total": self.total_rows(settings, task),
        }
        return texts_that_apply(rules, self.method, facts.get)

    def figures(self, settings: Settings, task: Task, file: str, tokens_so_far: str) -> Figures:
        """Return the source of tokens in a log of JSON lines; seconds are the time between two
        lines.
        """
        if not self.online:
            return Figures(
                kind="json", file=f"{OUT}/{file}", keys={"tokens_so_far": (tokens_so_far,)}
            )
        rows = self.total_rows(settings, task)
        return Figures(
            kind="json",
            file=f"{OUT}/{file}",
            keys={"tokens": ("completions/mean_length",)},
            times=rows,
        )

    def step(self, settings: Settings, task: Task) -> StandInSpec:
        micro, ranks = (
            count_of(settings, "per_device_train_batch_size"),
            self.ranks(settings, task.hardware.count),
        )
        (prompt, completion), accumulation = (
            self.lengths(settings),
            count_of(settings, "gradient_accumulation_steps") or 1,
        )
        shape: dict[str, Any] = {
            "prompt_length": prompt,
            "completion_length": completion,
            "tokens": micro * (prompt + completion),
            "score_tokens": micro * (prompt + completion),
            "micro_batch": micro,
            "accumulation": accumulation,
            "generation_batch": micro * ranks * accumulation if self.online else 0,
            "ranks": ranks,
            "loss": "logprobs_plain" if self.online else "causal_lm",
            "loss_options": {"completion_alone": True} if self.online else {},
            "optimizer": str(settings.get("optim")),
            "notes": tuple(self._texts(self.facts.notes, settings, task)),
        }
        return StandInSpec(**{**shape, **self.composition(settings, task)})

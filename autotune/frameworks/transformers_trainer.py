"""Frameworks whose trainers derive from those of transformers: ms-swift and unsloth.

Their settings have the names of transformers' arguments, and a YAML file lists those that a
candidate states. A subclass renders the run and names the models of a step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from autotune.core.job import Task
from autotune.core.space import Candidate, Knobs, KnobValue
from autotune.frameworks.base import Settings, as_word, count_of, other_global_batch
from autotune.frameworks.framework_facts import Untraced, refuse_untraced
from autotune.frameworks.launched_run import OF_TRANSFORMERS, OUT, Figures, Launched
from autotune.frameworks.settings_table import KINDS, Field, read_yaml
from autotune.frameworks.stand_in_step import STAND_IN, StandInSpec
from autotune.frameworks.stated_rules import Condition, StatedRule, texts_that_apply

N_SYNTHETIC_ROWS = 512


def ddp_options(settings: Mapping[str, object], *, adapter: bool) -> dict[str, object]:
    """Return DDP's options as transformers' Trainer passes them (`_build_accelerator_args`): with an adapter the
    model is not one of transformers' own, and parameters may be unused."""
    names = ("find_unused_parameters", "bucket_cap_mb", "static_graph")
    given = {name: settings[f"ddp_{name}"] for name in names if settings.get(f"ddp_{name}") is not None}
    return {"find_unused_parameters": adapter or not settings.get("gradient_checkpointing"), **given}


class Unread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings without effect if every condition holds: they would separate equal candidates."""

    settings: tuple[str, ...]
    when: dict[str, Condition]


class TrainerFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a framework and its own checks."""

    version: str
    requires: dict[str, str]  # module -> pip requirement with its supported versions
    defaults: dict[str, dict[str, KnobValue]]  # settings that candidates state: `common`, and those of each method
    canonical: dict[str, dict[str, str]]  # method -> autotune's flag -> setting
    implied: dict[str, dict[str, KnobValue]]  # value of `--tuning` -> settings
    batch_factors: str  # factors of the global batch, for a message
    choices: dict[str, tuple[KnobValue, ...]]
    unread: tuple[Unread, ...]
    rules: tuple[StatedRule, ...]
    notes: tuple[StatedRule, ...]
    untraced: tuple[Untraced, ...] = ()
    deepspeed: dict[str, dict[str, KnobValue]] = {}  # sharding -> options of the framework's own DeepSpeed configuration


class TransformersTrainer(Launched):
    """Method of a framework over transformers' trainers."""

    trace_adapter = STAND_IN
    watch = OF_TRANSFORMERS
    measures_rows = True
    equivalent_settings: Mapping[str, tuple[str, ...]] = {"gradient_accumulation_steps": ("global_batch",)}

    def __init__(self, method: str) -> None:
        facts = self.facts = msgspec.convert(read_yaml(f"{self.name}.yaml"), TrainerFacts)
        self.method, self.online, self.space = method, method == "grpo", f"{self.name}-{method}"
        self.defaults = {**facts.defaults["common"], **facts.defaults[method]}
        self.canonical, self.requires, self.needs = facts.canonical[method], facts.requires, tuple(facts.requires)

    def fields(self) -> Mapping[str, Field]:
        plain = {name: row.modelled[-1] for row in self.facts.untraced for name in row.settings}
        kinds = {name: "str" if value is None else KINDS[type(value)] for name, value in plain.items()}
        unmodelled = {name: Field(kinds=(kind, "null"), default=plain[name]) for name, kind in kinds.items()}
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
            settings["gradient_accumulation_steps"] = max(1, task.workload.global_batch // self._rows(settings, task))
        unread = {
            name for row in self.facts.unread if StatedRule("", row.when).applies("", settings.get) for name in row.settings
        }
        effective = {name: value for name, value in settings.items() if name not in unread}
        return Candidate(knobs=knobs, settings=effective, load=self.load_of(effective, task))

    def _rows(self, settings: Settings, task: Task) -> int:
        """Return the rows of one micro-step over all GPUs."""
        return max(1, count_of(settings, "per_device_train_batch_size") * self.ranks(settings, task.hardware.count))

    def total_rows(self, settings: Settings, task: Task) -> int:
        """Return the rows of one optimizer step, which are generated together."""
        return self._rows(settings, task) * count_of(settings, "gradient_accumulation_steps")

    def refusals(self, settings: Settings, task: Task) -> Iterator[str]:
        for name, choices in self.facts.choices.items():
            if settings.get(name) not in choices:
                yield f"{name} must be one of {', '.join(map(as_word, choices))}, and is {settings.get(name)!r}."
        yield from self._texts(self.facts.rules, settings, task)
        yield from other_global_batch(task, self.facts.batch_factors, self.total_rows(settings, task))

    def _texts(self, rules: tuple[StatedRule, ...], settings: Settings, task: Task) -> Iterator[str]:
        facts: Settings = {"device": task.hardware.kind, "gpus": task.hardware.count, "hardware": str(task.hardware)}
        facts = {**settings, **facts, "version": self.facts.version, "total": self.total_rows(settings, task)}
        return texts_that_apply(rules, self.method, facts.get)

    def figures(self, settings: Settings, task: Task, file: str, tokens_so_far: str) -> Figures:
        """Return the source of tokens in a log of JSON lines; seconds are the time between two lines."""
        if not self.online:
            return Figures(kind="json", file=f"{OUT}/{file}", keys={"tokens_so_far": (tokens_so_far,)})
        rows = self.total_rows(settings, task)
        return Figures(kind="json", file=f"{OUT}/{file}", keys={"tokens": ("completions/mean_length",)}, times=rows)

    def step(self, settings: Settings, task: Task) -> StandInSpec:
        micro, ranks = count_of(settings, "per_device_train_batch_size"), self.ranks(settings, task.hardware.count)
        (prompt, completion), accumulation = self.lengths(settings), count_of(settings, "gradient_accumulation_steps") or 1
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

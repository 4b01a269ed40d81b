"""TRL's trainers: GRPO, RLOO, SFT, DPO, KTO, reward models and online DPO, which `worker/trl`
runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

from autotune.core.composition import Composition
from autotune.core.dataset import ImageRows, PromptLengths, RowLengths
from autotune.core.errors import IllegalConfiguration
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate, Knobs, KnobValue, SearchSpace
from autotune.frameworks.base import Field, Settings, Trainer, count_of
from autotune.frameworks.dataset_measurement import measure_rows, prompt_lengths
from autotune.frameworks.trl import legality, output_files, requests
from autotune.frameworks.trl.combinations import quantisation
from autotune.frameworks.trl.field_list import fields, installed_defaults
from autotune.frameworks.trl.requests import NEW_BUFFERS, dataset_of
from autotune.frameworks.trl.settings import (
    COMPLETIONS_PER_ROW,
    LAUNCH_DEFAULTS,
    OFFLINE,
    OWN_SETTINGS,
    default,
    load_of,
    ranks_of,
    settings_of,
)
from autotune.frameworks.trl.user_config import TRAINED

DEFAULT_MICRO_BATCH = 8
MAX_DEFAULT_ACCUMULATION = 128
LENGTH_SETTINGS = ("max_prompt_length", "max_completion_length")
MICRO_BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"


class TrlGrpo(Trainer):
    """GRPO with TRL, and the base class of the other methods."""

    name = "trl"
    method = "grpo"
    adapter = "trl.grpo_probe"
    trace_adapter = "trl.step_trace"
    needs: tuple[str, ...] = ("trl",)
    space = "grpo"
    canonical: Mapping[str, str] = {
        name: name for name in (*LENGTH_SETTINGS, "num_generations", "lora_r")
    }
    own_settings = OWN_SETTINGS
    reads_config = True
    reads_images = True
    script: ClassVar[bool] = False
    """True for a method without a TRL command: a training script is written for it."""

    def fields(self) -> Mapping[str, Field]:
        return fields(self.method)

    def ranks(self, settings: Settings, gpus: int) -> int:
        return ranks_of(settings, gpus)

    def trained_defaults(
        self, stated: Settings, rest: Mapping[str, object], space: SearchSpace, python: Path
    ) -> Knobs:
        """Return TRL's defaults of all learning settings that the file does not state."""
        installed = installed_defaults(python, self.method)
        names = {knob.name for knob in space.knobs if knob.effect == "learning"} | {*TRAINED}
        unstated = {
            name: installed[name] for name in sorted(names & installed.keys() - stated.keys())
        }
        inside = rest.get("model_init_kwargs")
        named = (
            inside.get("dtype", inside.get("torch_dtype")) if isinstance(inside, Mapping) else None
        )
        if isinstance(named, str):
            unstated["dtype"] = named  # TRL's scripts prefer it to the setting of this name
        return {name: value for name, value in unstated.items() if value is not None}

    def complete(self, knobs: Knobs, task: Task) -> Candidate:
        settings = settings_of(knobs, task, self.method)
        return Candidate(knobs=knobs, settings=settings, load=load_of(settings, task))

    def why_illegal(self, candidate: Candidate, task: Task) -> str | None:
        return legality.why_illegal(candidate.settings, task, self.method)

    def notes(self, space: SearchSpace, task: Task) -> tuple[str, ...]:
        """Return the note on the buffers of a server's weight sync, if the job has one."""
        modes = (
            space["vllm_mode"].choices
            if "vllm_mode" in space
            else (task.workload.held.get("vllm_mode"),)
        )
        return (NEW_BUFFERS,) if "server" in modes else ()

    def baseline(self, space: SearchSpace, task: Task) -> Knobs:
        """Return the first legal batch shape at the user's or TRL's own knobs."""
        fixed = {
            knob.name: self.baseline_value(knob.name, knob.choices, knob.effect, task)
            for knob in space.knobs
        }
        first: Knobs | None = None
        for shape in self.batch_shapes(task):
            knobs = space.applicable(
                {**fixed, **{name: value for name, value in shape.items() if name in space}}
            )
            first = first or knobs
            if self.why_illegal(self.complete(knobs, task), task) is None:
                return knobs
        return first or space.applicable(fixed)

    def baseline_value(
        self, name: str, choices: tuple[KnobValue, ...], effect: str, task: Task
    ) -> KnobValue:
        """Return the held value, else TRL's default, else the most preferred choice.

        TRL's default applies to the user's own file and to neutral knobs."""
        if name in task.workload.held:
            return task.workload.held[name]
        known = name in self.fields()
        if task.workload.config_file is not None and known and None not in choices:
            return default(name, self.method)
        if name in LAUNCH_DEFAULTS and LAUNCH_DEFAULTS[name] in choices:
            return LAUNCH_DEFAULTS[name]
        return (
            choices[0]
            if effect == "learning" or len(choices) == 1 or not known
            else default(name, self.method)
        )

    def batch_shapes(self, task: Task) -> Iterator[dict[str, KnobValue]]:
        """Yield micro-batch and accumulation, which make the global batch; the largest micro-batch
        up to TRL's default first.

        Without a requested global batch, accumulation increases until groups are complete.
        """
        held, total = task.workload.held, task.workload.global_batch
        ranks = ranks_of({} if self.method in OFFLINE else held, task.hardware.count)
        for micro in (
            [held[MICRO_BATCH]] if MICRO_BATCH in held else range(DEFAULT_MICRO_BATCH, 0, -1)
        ):
            per_step = (
                COMPLETIONS_PER_ROW.get(self.method, 1)
                * (micro if isinstance(micro, int) else 0)
                * ranks
            )
            if ACCUMULATION in held:
                yield {MICRO_BATCH: micro, ACCUMULATION: held[ACCUMULATION]}
            elif total is None:
                most = MAX_DEFAULT_ACCUMULATION if "num_generations" in self.canonical else 1
                yield from (
                    {MICRO_BATCH: micro, ACCUMULATION: steps} for steps in range(1, most + 1)
                )
            elif per_step and total % per_step == 0:
                yield {MICRO_BATCH: micro, ACCUMULATION: total // per_step}

    def load_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        return {
            "method": self.method,
            "model": requests.model_request(candidate, task, weights=task.workload.weights),
            "adapter": requests.adapter_request(candidate, task),
            "engine": requests.engine_request(candidate),
            "server": requests.server_request(candidate, task),
            "launch": requests.launch_request(candidate, task),
            "device": task.hardware.kind,
            "seed": task.workload.seed,
            "trust_remote_code": task.workload.trust_remote_code,
        }

    def probe_request(
        self, candidate: Candidate, task: Task, plan: ProbePlan
    ) -> Mapping[str, object]:
        if (quantised := quantisation(task)) and task.workload.weights != "real":
            raise IllegalConfiguration(
                f"{task.workload.model.name}: random weights cannot be quantised, and the"
                f" checkpoint is ({quantised}).",
                way_out="Add --weights real, or use `autotune predict`.",
            )
        settings, user = candidate.settings, task.workload.user_settings
        return {
            "settings": requests.trainer_settings({**user, **settings}, self.method),
            "lengths": requests.lengths_request(settings, task),
            **requests.images_request(task),
            "dataset": dataset_of(task),
            "reward_funcs": user.get("reward_funcs"),
            "evaluation": None if self.script else requests.evaluation_request(task),
            "plan": asdict(plan),
            "seed": task.workload.seed,
        }

    def trace_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        return requests.trace_request(
            candidate, task, *(count_of(candidate.settings, name) for name in LENGTH_SETTINGS)
        )

    def prompt_lengths(self, task: Task, limit: int | None = None) -> PromptLengths | None:
        dataset = dataset_of(task)
        return None if dataset is None else prompt_lengths(task, dataset, limit)

    def image_rows(self, task: Task) -> ImageRows | None:
        dataset = dataset_of(task) if self.reads_images else None
        return None if dataset is None else measure_rows(task, dataset, ImageRows)

    def row_lengths(self, task: Task) -> RowLengths | None:
        dataset = dataset_of(task) if self.method == "sft" else None
        return None if dataset is None else measure_rows(task, dataset, RowLengths)

    def write_files(
        self, candidate: Candidate, task: Task, folder: Path, destination: Path | None = None
    ) -> list[Path]:
        return output_files.write_files(
            candidate, task, folder, dataset_of(task), script=self.script, destination=destination
        )

    def compose(self, candidate: Candidate, task: Task) -> Composition:
        return requests.compose(candidate, task)


class TrlRloo(TrlGrpo):
    """RLOO with TRL."""

    method = space = "rloo"


class TrlOffline(TrlGrpo):
    """SFT, DPO, KTO or a reward model with TRL, which train on given rows."""

    canonical: Mapping[str, str] = {name: name for name in (*LENGTH_SETTINGS, "lora_r")}

    def __init__(self, method: str, requires: Mapping[str, str] | None = None) -> None:
        self.method = self.space = method
        self.reads_images, self.requires = method == "sft", requires or {}

    def baseline_value(
        self, name: str, choices: tuple[KnobValue, ...], effect: str, task: Task
    ) -> KnobValue:
        if name in task.workload.held:
            return task.workload.held[name]
        if effect == "learning" or len(choices) == 1 or name not in self.fields():
            return choices[0]
        return default(name, self.method)

    def prompt_lengths(self, task: Task, limit: int | None = None) -> None:
        """Return None: prompts have no limit of their own."""

    def probe_request(
        self, candidate: Candidate, task: Task, plan: ProbePlan
    ) -> Mapping[str, object]:
        prompt, completion = (candidate.settings[name] for name in LENGTH_SETTINGS)
        request = {**super().probe_request(candidate, task, plan)}
        del request["reward_funcs"]
        return {**request, "lengths": {"prompt": prompt, "completion": completion, "typical": None}}


class TrlScripted(TrlGrpo):
    """Experimental method without a TRL command: a training script is written for it."""

    script = True
    reads_images = False


class TrlOnlineDpo(TrlScripted):
    """Online DPO with TRL: each micro-step generates two completions per prompt and compares
    them.
    """

    method = space = "online-dpo"
    canonical: Mapping[str, str] = {
        "max_prompt_length": "max_prompt_length",
        "max_completion_length": "max_new_tokens",
        "lora_r": "lora_r",
    }
    completions_each = COMPLETIONS_PER_ROW["online-dpo"]

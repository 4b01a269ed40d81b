"""TRL's trainers: GRPO, RLOO, SFT, DPO, KTO, reward models, online DPO, asynchronous GRPO and PPO.

`worker/trl` runs them. The last three are experimental and have no command, so that a script is
written for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, cast

from autotune.core.composition import Composition
from autotune.core.dataset import ImageRows, PromptLengths, RowLengths
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate, Knobs, KnobValue, SearchSpace
from autotune.core.user_script import UserScript
from autotune.frameworks import stand_in_step
from autotune.frameworks.base import Settings, Trainer, count_of
from autotune.frameworks.dataset_measurement import image_rows, prompt_lengths, row_lengths
from autotune.frameworks.settings_table import Field
from autotune.frameworks.trl import async_grpo, legality, output_files, requests, script_files, user_config
from autotune.frameworks.trl.field_list import fields
from autotune.frameworks.trl.requests import dataset_of
from autotune.frameworks.trl.resident_models import NEW_BUFFERS, compose, ppo_step
from autotune.frameworks.trl.settings import COMPLETIONS_PER_ROW, OFFLINE, OWN_SETTINGS, default, load_of, settings_of
from autotune.frameworks.trl.topology import PLAIN, ranks_of, server_gpus

DEFAULT_MICRO_BATCH = 8
MAX_DEFAULT_ACCUMULATION = 128
LENGTHS = ("max_prompt_length", "max_completion_length")
MICRO_BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"


class TrlGrpo(Trainer):
    """GRPO with TRL, and the base class of the other methods."""

    name = "trl"
    method = "grpo"
    adapter = "trl.grpo_probe"
    trace_adapter = "trl.step_trace"
    needs: tuple[str, ...] = ("trl",)
    space = "grpo"
    canonical: Mapping[str, str] = {name: name for name in (*LENGTHS, "num_generations", "lora_r")}
    own_settings = OWN_SETTINGS
    reads_config = True
    reads_images = True
    script: ClassVar[bool] = False
    """True for a method without a TRL command: a training script is written for it."""

    def fields(self) -> Mapping[str, Field]:
        return fields(self.method)

    def ranks(self, settings: Settings, gpus: int) -> int:
        return ranks_of(settings, gpus)

    def trained_defaults(self, stated: Settings, rest: Mapping[str, object], space: SearchSpace, python: Path) -> Knobs:
        return user_config.trained_defaults(stated, rest, space, python, self.method)

    def complete(self, knobs: Knobs, task: Task) -> Candidate:
        settings = settings_of(knobs, task, self.method)
        return Candidate(knobs=knobs, settings=settings, load=load_of(settings, task))

    def why_illegal(self, candidate: Candidate, task: Task) -> str | None:
        return legality.why_illegal(candidate.settings, task, self.method)

    def notes(self, space: SearchSpace, task: Task) -> tuple[str, ...]:
        """Return the note on the buffers of a server's weight sync, if the job has one."""
        modes = space["vllm_mode"].choices if "vllm_mode" in space else (task.workload.held.get("vllm_mode"),)
        return (NEW_BUFFERS,) if "server" in modes else ()

    def baseline(self, space: SearchSpace, task: Task) -> Knobs:
        """Return the first legal batch shape at the user's or TRL's own knobs."""
        fixed = {knob.name: self.baseline_value(knob.name, knob.choices, knob.effect, task) for knob in space.knobs}
        first: Knobs | None = None
        for shape in self.batch_shapes(task):
            knobs = space.applicable({**fixed, **{name: value for name, value in shape.items() if name in space}})
            first = first or knobs
            if self.why_illegal(self.complete(knobs, task), task) is None:
                return knobs
        return first or space.applicable(fixed)

    def baseline_value(self, name: str, choices: tuple[KnobValue, ...], effect: str, task: Task) -> KnobValue:
        """Return the held value, else TRL's default, else the most preferred choice.

        TRL's default applies to the user's own file and to neutral knobs."""
        if name in task.workload.held:
            return task.workload.held[name]
        known = name in self.fields()
        if task.workload.config_file is not None and known and None not in choices:
            return default(name, self.method)
        if name in PLAIN and PLAIN[name] in choices:
            return PLAIN[name]
        return choices[0] if effect == "learning" or len(choices) == 1 or not known else default(name, self.method)

    def batch_shapes(self, task: Task) -> Iterator[dict[str, KnobValue]]:
        """Yield micro-batch and accumulation, which make the global batch; the largest micro-batch up to TRL's default first.

        Without a requested global batch, accumulation increases until groups are complete."""
        held, total = task.workload.held, task.workload.global_batch
        ranks = ranks_of({} if self.method in OFFLINE else held, task.hardware.count)
        for micro in [held[MICRO_BATCH]] if MICRO_BATCH in held else range(DEFAULT_MICRO_BATCH, 0, -1):
            per_step = COMPLETIONS_PER_ROW.get(self.method, 1) * (micro if isinstance(micro, int) else 0) * ranks
            if ACCUMULATION in held:
                yield {MICRO_BATCH: micro, ACCUMULATION: held[ACCUMULATION]}
            elif total is None:
                most = MAX_DEFAULT_ACCUMULATION if "num_generations" in self.canonical else 1
                yield from ({MICRO_BATCH: micro, ACCUMULATION: steps} for steps in range(1, most + 1))
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

    def probe_request(self, candidate: Candidate, task: Task, plan: ProbePlan) -> Mapping[str, object]:
        requests.refuse_unmeasurable(task)
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
        return requests.trace_request(candidate, task, *(count_of(candidate.settings, name) for name in LENGTHS))

    def prompt_lengths(self, task: Task, limit: int | None = None) -> PromptLengths | None:
        return prompt_lengths(task, dataset_of(task), limit)

    def image_rows(self, task: Task) -> ImageRows | None:
        return image_rows(task, dataset_of(task)) if self.reads_images else None

    def row_lengths(self, task: Task) -> RowLengths | None:
        return row_lengths(task, dataset_of(task)) if self.method == "sft" else None

    def write_files(self, candidate: Candidate, task: Task, folder: Path, destination: Path | None = None) -> list[Path]:
        return output_files.write_files(candidate, task, folder, dataset_of(task), script=self.script, destination=destination)

    def compose(self, candidate: Candidate, task: Task) -> Composition:
        return compose(candidate, task)


class TrlRloo(TrlGrpo):
    """RLOO with TRL."""

    method = space = "rloo"


class TrlOffline(TrlGrpo):
    """SFT, DPO, KTO or a reward model with TRL, which train on given rows."""

    canonical: Mapping[str, str] = {name: name for name in (*LENGTHS, "lora_r")}

    def __init__(self, method: str, requires: Mapping[str, str] | None = None) -> None:
        self.method = self.space = method
        self.reads_images, self.requires = method == "sft", requires or {}

    def baseline_value(self, name: str, choices: tuple[KnobValue, ...], effect: str, task: Task) -> KnobValue:
        if name in task.workload.held:
            return task.workload.held[name]
        if effect == "learning" or len(choices) == 1 or name not in self.fields():
            return choices[0]
        return default(name, self.method)

    def prompt_lengths(self, task: Task, limit: int | None = None) -> None:
        """Return None: prompts have no limit of their own."""

    def probe_request(self, candidate: Candidate, task: Task, plan: ProbePlan) -> Mapping[str, object]:
        prompt, completion = (candidate.settings[name] for name in LENGTHS)
        request = {**super().probe_request(candidate, task, plan)}
        del request["reward_funcs"]
        return {**request, "lengths": {"prompt": prompt, "completion": completion, "typical": None}}


class TrlOnlineDpo(TrlGrpo):
    """Online DPO with TRL: each micro-step generates two completions per prompt and compares them."""

    method = space = "online-dpo"
    canonical: Mapping[str, str] = {
        "max_prompt_length": "max_prompt_length", "max_completion_length": "max_new_tokens", "lora_r": "lora_r",
    }  # fmt: skip
    script = True
    reads_images = False
    completions_each = COMPLETIONS_PER_ROW["online-dpo"]


class TrlPpo(TrlGrpo):
    """PPO with TRL up to 1.12: policy, reference, critic and reward model on every rank.

    Later releases lack the trainer, so that predictions use a stand-in step (`ppo_step`)."""

    method = space = "ppo"
    trace_adapter = stand_in_step.STAND_IN
    requires: Mapping[str, str] = {"trl": "trl>=1.0,<1.13"}
    canonical: Mapping[str, str] = {
        "max_prompt_length": "max_prompt_length", "max_completion_length": "response_length", "lora_r": "lora_r",
    }  # fmt: skip
    script = True
    reads_images = False

    def trace_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        return stand_in_step.trace_request(ppo_step(candidate, task), task)

    def compose(self, candidate: Candidate, task: Task) -> Composition:
        return stand_in_step.compose(ppo_step(candidate, task), task)


class TrlAsyncGrpo(TrlGrpo):
    """Asynchronous GRPO with TRL: rollouts of a vLLM server on GPUs of its own, trained on as they arrive."""

    method = space = async_grpo.METHOD
    requires: Mapping[str, str] = {"trl": "trl>=1.16,<1.17"}
    script = True
    reads_images = False
    completions_each = 0

    def ranks(self, settings: Settings, gpus: int) -> int:
        return ranks_of({**settings, **async_grpo.SERVED}, gpus)

    def complete(self, knobs: Knobs, task: Task) -> Candidate:
        settings = async_grpo.settings_of(knobs, task)
        return Candidate(knobs=knobs, settings=settings, load=async_grpo.load_of(settings, task))

    def why_illegal(self, candidate: Candidate, task: Task) -> str | None:
        return async_grpo.why_illegal(candidate.settings, task)

    def batch_shapes(self, task: Task) -> Iterator[dict[str, KnobValue]]:
        """Yield the accumulation alone, fewest first: it makes the global batch, whatever fills a row."""
        held = task.workload.held.get(ACCUMULATION)
        for steps in [held] if held is not None else range(1, MAX_DEFAULT_ACCUMULATION + 1):
            yield {ACCUMULATION: steps}

    def load_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        """Leave the server out, and its GPUs idle: a probe is the trainer alone, with rollouts at hand."""
        return {**super().load_request(candidate, task), "server": None, "idle": {"gpus": server_gpus(candidate.settings)}}

    def probe_request(self, candidate: Candidate, task: Task, plan: ProbePlan) -> Mapping[str, object]:
        return {**super().probe_request(candidate, task, plan), "dataset": None, "reward_funcs": None}

    def trace_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        return async_grpo.trace_request(candidate, task)

    def compose(self, candidate: Candidate, task: Task) -> Composition:
        return async_grpo.compose(candidate, task)


TRAINERS = (
    TrlGrpo(),
    TrlRloo(),
    TrlOffline("sft"),
    TrlOffline("dpo"),
    TrlOffline("kto", {"trl": "trl>=1.8,<1.17"}),
    TrlOffline("reward"),
    TrlOnlineDpo(),
    TrlAsyncGrpo(),
    TrlPpo(),
)


def script_trainer(inner: Trainer, script: UserScript) -> Trainer:
    """Return `inner` for a script of the user."""
    return cast("Trainer", _ScriptTrainer(inner, script))


class _ScriptTrainer:
    """TRL trainer inside a script of the user. Members that are not defined here are those of `inner`."""

    adapter = "trl.script_probe"

    def __init__(self, inner: Trainer, script: UserScript) -> None:
        self._inner, self._script = inner, script

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def prompt_lengths(self, task: Task, limit: int | None = None) -> PromptLengths | None:
        """Return the inspected lengths. The number of rows within `limit` is exact to a percentile."""
        look = self._script.look
        if look.prompts is None or look.rows is None:
            return None
        percentiles = {int(share): length for share, length in look.prompts.items()}
        within = max((share for share, length in percentiles.items() if limit is None or length <= limit), default=0)
        return PromptLengths(rows=look.rows, kept=look.rows * within // 100, percentiles=percentiles)

    def image_rows(self, task: Task) -> None:
        """Return None: the script prepares its own rows."""

    row_lengths = image_rows

    def load_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        script = self._script
        return {
            **self._inner.load_request(candidate, task),
            "script": {
                "path": str(Path(script.path)),
                "arguments": list(script.arguments),
                "method": script.look.method,
                "gives_model": script.look.model.given,
                "rewards": script.rewards,
            },
        }

    def probe_request(self, candidate: Candidate, task: Task, plan: ProbePlan) -> Mapping[str, object]:
        return {**self._inner.probe_request(candidate, task, plan), "dataset": None, "reward_funcs": None}

    def write_files(self, candidate: Candidate, task: Task, folder: Path, destination: Path | None = None) -> list[Path]:
        """Write a patch of the script, or its flags, and a launch script."""
        return script_files.write_files(candidate, task, folder, self._script)

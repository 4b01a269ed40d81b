"""unsloth: TRL's trainers, patched, on one GPU. There is no command line, so a script is written and started.

Read from unsloth 2026.10.9 (`models/loader.py`, `models/llama.py`, `models/rl.py`, `unsloth_zoo/vllm_utils.py`). It rewrites
settings without an error: the micro-batch becomes `num_generations` where groups would not be whole, and standby sets its own
share for vLLM. So what would be rewritten is refused, and the script writes down what its configuration came to, to be read back.
"""

from __future__ import annotations

import json
import pprint
from collections.abc import Iterator, Mapping
from typing import ClassVar

from autotune.candidate import Candidate, Knobs, KnobValue
from autotune.composition import Composition
from autotune.trainers.base import Job, ProbePlan, RowLengths, count_of, other_global_batch
from autotune.trainers.generic_step import STAND_IN, compose, trace_request
from autotune.trainers.launching import OF_TRANSFORMERS, OUT, Figures, Launch, Launched, ToldSettings
from autotune.trainers.rows import row_lengths
from autotune.trainers.unsloth_script import REWARD, SCRIPT, TRAINERS_OF
from autotune.trainers.unsloth_step import step

Settings = Mapping[str, KnobValue]

CHECKPOINTING = ("unsloth", True, False)
MADE_UP_ROWS = 512

COMMON: Mapping[str, KnobValue] = {
    "max_seq_length": 2048, "load_in_4bit": False, "full_finetuning": False, "lora_rank": 16,
    "use_gradient_checkpointing": "unsloth", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
    "optim": "adamw_8bit", "offload_embedding": False,
}  # fmt: skip
BY_METHOD: Mapping[str, Mapping[str, KnobValue]] = {
    "sft": {"packing": False},
    "grpo": {
        "num_generations": 8, "max_completion_length": 512, "max_prompt_length": 512, "beta": 0.0, "fast_inference": True,
        "gpu_memory_utilization": 0.5, "float8_kv_cache": False, "vllm_standby": False, "unsloth_grpo_mini_batch": None,
        "unsloth_logit_chunk_multiplier": None,
    },
}  # fmt: skip

ALIKE = ("max_prompt_length", "max_completion_length", "num_generations")
"""Of autotune's own flags, those that it calls the same."""

OF_THE_MODEL = ("max_seq_length", "load_in_4bit", "full_finetuning", "offload_embedding")
OF_THE_ENGINE = ("fast_inference", "gpu_memory_utilization", "float8_kv_cache")
OURS = frozenset({*OF_THE_MODEL, *OF_THE_ENGINE, "lora_rank", "use_gradient_checkpointing", "vllm_standby", "max_prompt_length"})
"""What the trainer's configuration does not take."""


class Unsloth(Launched):
    """One of TRL's methods under unsloth."""

    name = "unsloth"
    needs = ("unsloth",)
    trace_adapter = STAND_IN
    requires: ClassVar[Mapping[str, str]] = {"unsloth": "unsloth>=2026.10,<2026.11"}
    watch = OF_TRANSFORMERS

    def __init__(self, method: str) -> None:
        self.method = method
        self.space = f"unsloth-{method}"
        self.defaults = {**COMMON, **BY_METHOD[method]}
        self.canonical = {"lora_r": "lora_rank", **{name: name for name in ALIKE if name in self.defaults}}

    def complete(self, knobs: Knobs, job: Job) -> Candidate:
        held = {self.canonical.get(name, name): value for name, value in job.workload.held.items()}
        tuning = job.workload.tuning
        said: dict[str, KnobValue] = {"full_finetuning": tuning == "full", "load_in_4bit": tuning == "qlora"}
        given = {**said, **{name: value for name, value in held.items() if name in self.defaults}, **knobs}
        settings = {**self.defaults, **given}
        if self.method == "grpo":
            settings["max_seq_length"] = count_of(settings, "max_prompt_length") + count_of(settings, "max_completion_length")
        if "gradient_accumulation_steps" not in given and job.workload.global_batch:
            rows = max(1, count_of(settings, "per_device_train_batch_size"))
            settings["gradient_accumulation_steps"] = max(1, job.workload.global_batch // rows)
        kept = {name: value for name, value in settings.items() if _matters(name, settings)}
        return Candidate(knobs=knobs, settings=kept, load=self.load_of(kept, job))

    def trace_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        return trace_request(step(candidate.settings, job, self.method), job)

    def compose(self, candidate: Candidate, job: Job) -> Composition:
        return compose(step(candidate.settings, job, self.method), job)

    def row_lengths(self, job: Job) -> RowLengths | None:
        dataset = job.workload.dataset
        return row_lengths(job, {"dataset_name": dataset}) if self.method == "sft" and dataset else None

    def why_illegal(self, candidate: Candidate, job: Job) -> str | None:
        return next(self._refusals(candidate.settings, job), None)

    def _refusals(self, settings: Settings, job: Job) -> Iterator[str]:
        if job.hardware.kind != "cuda":
            yield (
                f"unsloth does not start without a GPU, and was asked about {job.hardware}: name one with --gpus, like "
                "--gpus A100-40G. One that is not here is predicted."
            )
        if job.hardware.count != 1:
            yield f"unsloth is started on one GPU here, and these are {job.hardware.count}: give one with --gpus."
        total = _rows(settings)
        if (other := other_global_batch(job, "micro-batch x gradient_accumulation_steps", total)) is not None:
            yield other
        if settings.get("use_gradient_checkpointing") not in CHECKPOINTING:
            said = settings.get("use_gradient_checkpointing")
            yield f"use_gradient_checkpointing must be unsloth, true or false, and is {said!r}."
        if settings.get("full_finetuning") and settings.get("load_in_4bit"):
            yield "full_finetuning trains all weights, and load_in_4bit leaves none that can be trained: take one of the two."
        if self.method == "grpo":
            yield from _grpo_refusals(settings, total)

    def launch(self, candidate: Candidate, job: Job, plan: ProbePlan | None = None) -> Launch:
        return Launch(
            argv=(str(job.workload.python), f"{OUT}/train.py"),
            figures=self._figures(candidate.settings),
            environment=_environment(candidate.settings),
            files=self._files(candidate.settings, job, plan),
            effective=ToldSettings(kind="json", file=f"{OUT}/settings.json"),
        )

    def _files(self, settings: Settings, job: Job, plan: ProbePlan | None) -> dict[str, str]:
        dataset = job.workload.dataset
        made_up = {} if dataset is not None else {"rows.jsonl": self._made_up(settings)}
        return {"train.py": self._script(settings, job, plan, dataset or f"{OUT}/rows.jsonl"), **made_up}

    def _script(self, settings: Settings, job: Job, plan: ProbePlan | None, dataset: str) -> str:
        model: dict[str, object] = {name: settings[name] for name in (*OF_THE_MODEL, *OF_THE_ENGINE) if name in settings}
        if settings.get("fast_inference"):
            model["max_lora_rank"] = settings.get("lora_rank")
        config: dict[str, object] = {name: value for name, value in settings.items() if name not in OURS and value is not None}
        config |= {"output_dir": f"{OUT}/output", "logging_steps": 1, "report_to": "none", "seed": job.workload.seed}
        if self.method == "sft":
            config["max_length"] = settings["max_seq_length"]
        elif settings.get("fast_inference"):
            config["use_vllm"] = True
        adapter: dict[str, object] | None = None
        if not settings.get("full_finetuning"):
            rank = settings.get("lora_rank")
            adapter = {"r": rank, "lora_alpha": rank, "use_gradient_checkpointing": settings["use_gradient_checkpointing"]}
        trainer, config_class = TRAINERS_OF[self.method]
        return SCRIPT.format(
            method=self.method.upper(), model_name=job.workload.model.name, config_class=config_class, trainer=trainer, out=OUT,
            model=_plain({"model_name": str(job.workload.model.folder or job.workload.model.name), **model}),
            adapter=_plain(adapter), config=_plain({**config, **_bounded(plan)}), dataset=_plain(dataset),
            settings=_plain(sorted(settings)), reward=REWARD if self.method == "grpo" else "",
            reward_argument="reward_funcs=reward, " if self.method == "grpo" else "",
        )  # fmt: skip

    def _figures(self, settings: Settings) -> Figures:
        """TRL's own log, which the script writes down: seconds are those from one step to the next."""
        file = f"{OUT}/log.jsonl"
        if self.method == "sft":
            return Figures(kind="json", file=file, keys={"tokens_so_far": ("num_tokens",)})
        return Figures(kind="json", file=file, keys={"tokens": ("completions/mean_length",)}, times=_rows(settings))

    def _made_up(self, settings: Settings) -> str:
        """Rows that differ: of SFT as long as they may be, of GRPO prompts that are not too long."""
        grpo = self.method == "grpo"
        words = max(1, (count_of(settings, "max_prompt_length") - 64) // 2) if grpo else count_of(settings, "max_seq_length")
        lines = []
        for number in range(MADE_UP_ROWS):
            text = " ".join(str((number * 7919 + word * 31) % 997 % 10) for word in range(words))
            lines.append(json.dumps({"prompt": text} if grpo else {"text": text}))
        return "\n".join(lines) + "\n"


def _grpo_refusals(settings: Settings, total: int) -> Iterator[str]:
    generations = count_of(settings, "num_generations")
    if generations < 2:
        yield f"num_generations must be at least 2, to compare completions of one prompt, and is {generations}."
    elif total % generations:
        yield (
            f"per_device_train_batch_size x gradient_accumulation_steps is {total}, not divisible by "
            f"num_generations={generations}: unsloth would silently make the micro-batch {generations}."
        )
    if settings.get("vllm_standby") and not settings.get("fast_inference"):
        yield "vllm_standby puts vLLM to sleep, and without fast_inference=true there is none."
    if settings.get("fast_inference") and settings.get("full_finetuning"):
        yield "fast_inference shares frozen weights with vLLM, and full_finetuning changes them: give --tuning lora or qlora."


def _environment(settings: Settings) -> dict[str, str]:
    """Standby overrides the share of vLLM unless it is told not to."""
    if not settings.get("vllm_standby"):
        return {}
    return {"UNSLOTH_VLLM_STANDBY": "1", "UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE": "1"}


def _bounded(plan: ProbePlan | None) -> dict[str, KnobValue]:
    if plan is None:
        return {}
    steps = max(plan.optimizer_steps, plan.warmup_cycles + plan.timed_cycles) + 1
    return {"max_steps": steps, "save_strategy": "no", "learning_rate": 0.0}


def _matters(name: str, settings: Settings) -> bool:
    """Settings that nothing reads would tell equal candidates apart."""
    if name in (*OF_THE_ENGINE[1:], "vllm_standby"):
        return bool(settings.get("fast_inference"))
    return not (name == "lora_rank" and settings.get("full_finetuning"))


def _rows(settings: Settings) -> int:
    return count_of(settings, "per_device_train_batch_size") * count_of(settings, "gradient_accumulation_steps")


def _plain(value: object) -> str:
    return pprint.pformat(value, width=100, sort_dicts=False)


TRAINERS = (Unsloth("sft"), Unsloth("grpo"))

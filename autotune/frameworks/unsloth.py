"""unsloth: TRL's trainers, patched, on one GPU. It has no command line, so a script is written and started.

Written for unsloth 2026.10.9 (`models/loader.py`, `models/llama.py`, `models/rl.py`,
`unsloth_zoo/vllm_utils.py`). unsloth rewrites settings without an error: the micro-batch becomes
`num_generations` if groups are incomplete, and standby overrides vLLM's share. Such settings are
refused, and the script records its effective configuration.

Its kernels replace layers, loss and checkpointing. They need at most the memory of a plain step,
the estimate and its upper end, and at least the training state, the lower end.
"""

from __future__ import annotations

import json
import pprint
from collections.abc import Iterator, Mapping
from pathlib import Path

from autotune.core.candidate import Candidate, Knobs, KnobValue
from autotune.core.composition import EngineSettings
from autotune.core.probe_plan import ProbePlan
from autotune.core.task import Task
from autotune.frameworks.base import Settings, count_of, model_path, other_global_batch, share_of
from autotune.frameworks.launched_run import (
    OF_TRANSFORMERS,
    OUT,
    SYNTHETIC_ROWS,
    Figures,
    Launch,
    Launched,
    ReportedSettings,
    probe_steps,
    synthetic_prompts,
    synthetic_text,
)  # fmt: skip
from autotune.frameworks.settings_table import read_defaults
from autotune.frameworks.stand_in_step import STAND_IN, StandInSpec

CHECKPOINTING = ("unsloth", True, False)
N_SYNTHETIC_ROWS = 512

SAME_NAMES = ("max_prompt_length", "max_completion_length", "num_generations")
"""autotune's flags with the same name in unsloth."""

OF_THE_MODEL = ("max_seq_length", "load_in_4bit", "full_finetuning", "offload_embedding")
OF_THE_ENGINE = ("fast_inference", "gpu_memory_utilization", "float8_kv_cache")
NOT_IN_CONFIG = frozenset(
    {*OF_THE_MODEL, *OF_THE_ENGINE, "lora_rank", "use_gradient_checkpointing", "vllm_standby", "max_prompt_length"}
)
"""Settings that the trainer's configuration class lacks."""

FUSED_PARTS = ("activations", "logits")
"""Memory that the kernels can avoid: chunked losses, and checkpoints offloaded to the host."""

NOTES = (
    "modelled on unsloth 2026.10: a plain step is the upper end; at the lower end its kernels keep no activations and no logits",
    "vLLM shares the model's weights, which count once",
)

TRAINER_CLASSES = {"sft": ("SFTTrainer", "SFTConfig"), "grpo": ("GRPOTrainer", "GRPOConfig")}
SCRIPT = Path(__file__).with_name("unsloth_script.txt")
REWARD = '''

def reward(completions, **rest):
    """Replace this by your own reward: it prefers short completions."""
    return [-float(len(completion)) for completion in completions]
'''


class Unsloth(Launched):
    """TRL method under unsloth."""

    name = "unsloth"
    needs = ("unsloth",)
    trace_adapter = STAND_IN
    requires: Mapping[str, str] = {"unsloth": "unsloth>=2026.10,<2026.11"}
    watch = OF_TRANSFORMERS
    measures_rows = True

    def __init__(self, method: str) -> None:
        self.method, self.online = method, method == "grpo"
        self.space = f"unsloth-{method}"
        self.defaults = read_defaults("unsloth.yaml", method)
        self.canonical = {"lora_r": "lora_rank", **{name: name for name in SAME_NAMES if name in self.defaults}}

    def complete(self, knobs: Knobs, task: Task) -> Candidate:
        tuning = task.workload.tuning
        implied: dict[str, KnobValue] = {"full_finetuning": tuning == "full", "load_in_4bit": tuning == "qlora"}
        given = {**implied, **self.held(task), **knobs}
        settings = {**self.defaults, **given}
        if self.online:
            settings["max_seq_length"] = sum(self._lengths(settings))
        if "gradient_accumulation_steps" not in given and task.workload.global_batch:
            rows = max(1, count_of(settings, "per_device_train_batch_size"))
            settings["gradient_accumulation_steps"] = max(1, task.workload.global_batch // rows)
        effective = {name: value for name, value in settings.items() if _is_read(name, settings)}
        return Candidate(knobs=knobs, settings=effective, load=self.load_of(effective, task))

    def refusals(self, settings: Settings, task: Task) -> Iterator[str]:
        if task.hardware.kind != "cuda":
            yield (
                f"unsloth requires a GPU, and the request is for {task.hardware}: name one with --gpus, like "
                "--gpus A100-40G. A GPU of another machine is predicted."
            )
        if task.hardware.count != 1:
            yield f"unsloth runs on one GPU, and the request is for {task.hardware.count}: name one with --gpus."
        total = _rows(settings)
        if (other := other_global_batch(task, "micro-batch x gradient_accumulation_steps", total)) is not None:
            yield other
        if (checkpointing := settings.get("use_gradient_checkpointing")) not in CHECKPOINTING:
            yield f"use_gradient_checkpointing must be unsloth, true or false, and is {checkpointing!r}."
        if settings.get("full_finetuning") and settings.get("load_in_4bit"):
            yield "full_finetuning trains all weights, and 4-bit weights cannot be trained: drop full_finetuning or load_in_4bit."
        if self.online:
            yield from _grpo_refusals(settings, total)

    def launch(self, candidate: Candidate, task: Task, plan: ProbePlan | None = None) -> Launch:
        settings, dataset = candidate.settings, task.workload.dataset
        files = {} if dataset is not None else {SYNTHETIC_ROWS: self._synthetic_rows(settings)}
        standby = {"UNSLOTH_VLLM_STANDBY": "1", "UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE": "1"}  # keeps the given vLLM share
        return Launch(
            argv=(str(task.workload.python), f"{OUT}/train.py"),
            figures=self._figures(settings),
            environment=standby if settings.get("vllm_standby") else {},
            files={"train.py": self._script(settings, task, plan, dataset), **files},
            effective=ReportedSettings(kind="json", file=f"{OUT}/settings.json"),
        )

    def _script(self, settings: Settings, task: Task, plan: ProbePlan | None, dataset: str | None) -> str:
        model: dict[str, object] = {name: settings[name] for name in (*OF_THE_MODEL, *OF_THE_ENGINE) if name in settings}
        if settings.get("fast_inference"):
            model["max_lora_rank"] = settings.get("lora_rank")
        config: dict[str, object] = {
            name: value for name, value in settings.items() if name not in NOT_IN_CONFIG and value is not None
        }
        config |= {"logging_steps": 1, "report_to": "none", "seed": task.workload.seed}
        if not self.online:
            config["max_length"] = settings["max_seq_length"]
        elif settings.get("fast_inference"):
            config["use_vllm"] = True
        if plan is not None:
            config |= {"max_steps": probe_steps(plan) + 1, "save_strategy": "no", "learning_rate": 0.0}
        adapter: dict[str, object] | None = None
        if not settings.get("full_finetuning"):
            rank = settings.get("lora_rank")
            adapter = {"r": rank, "lora_alpha": rank, "use_gradient_checkpointing": settings["use_gradient_checkpointing"]}
        trainer, config_class = TRAINER_CLASSES[self.method]
        title = f"{self.method.upper()} with unsloth: {task.workload.model.name}"
        rows = f'str(OUT / "{SYNTHETIC_ROWS}")' if dataset is None else _literal(dataset)
        return SCRIPT.read_text(encoding="utf-8").format(
            title=repr(title), config_class=config_class, trainer=trainer,
            model=_literal({"model_name": model_path(task), **model}), adapter=_literal(adapter), config=_literal(config),
            dataset=rows, settings=_literal(sorted(settings)), reward=REWARD if self.online else "",
            reward_argument="reward_funcs=reward, " if self.online else "",
        )  # fmt: skip

    def _figures(self, settings: Settings) -> Figures:
        """Return TRL's log as the script writes it; seconds are the time between two steps."""
        file = f"{OUT}/log.jsonl"
        if not self.online:
            return Figures(kind="json", file=file, keys={"tokens_so_far": ("num_tokens",)})
        return Figures(kind="json", file=file, keys={"tokens": ("completions/mean_length",)}, times=_rows(settings))

    def _synthetic_rows(self, settings: Settings) -> str:
        """Return different rows: of the longest length for SFT, prompts within the limit for GRPO."""
        if self.online:
            key, texts = "prompt", synthetic_prompts(N_SYNTHETIC_ROWS, count_of(settings, "max_prompt_length"))
        else:
            words = count_of(settings, "max_seq_length")
            key, texts = "text", [synthetic_text(number, words) for number in range(N_SYNTHETIC_ROWS)]
        return "".join(json.dumps({key: text}) + "\n" for text in texts)

    def step(self, settings: Settings, task: Task) -> StandInSpec:
        micro = count_of(settings, "per_device_train_batch_size")
        accumulation = count_of(settings, "gradient_accumulation_steps") or 1
        prompt, completion = self._lengths(settings)
        with_engine, quantised = self.online and bool(settings.get("fast_inference")), bool(settings.get("load_in_4bit"))
        rank = count_of(settings, "lora_rank")
        adapter = {"lora_r": rank, "lora_alpha": rank, "lora_target_modules": "all-linear"}
        engine = EngineSettings(
            utilization=share_of(settings, "gpu_memory_utilization"),
            max_model_length=prompt + completion,
            max_num_seqs=micro * accumulation,
            sleep=bool(settings.get("vllm_standby")),
            quantised_bits=4 if quantised else None,
            shares_weights=True,
        )
        return StandInSpec(
            prompt_length=prompt,
            completion_length=completion,
            tokens=micro * (prompt + completion),
            score_tokens=micro * (prompt + completion),
            micro_batch=micro,
            accumulation=accumulation,
            generation_batch=micro * accumulation if self.online else 0,
            ranks=1,
            adapter=None if settings.get("full_finetuning") else adapter,
            quantised=quantised,
            loss="logprobs_plain" if self.online else "causal_lm",
            loss_options={"completion_alone": True} if self.online else {},
            checkpointing=bool(settings.get("use_gradient_checkpointing")),
            optimizer=str(settings.get("optim")),
            attention="sdpa",
            generation="none" if not self.online else "engine" if with_engine else "trainer",
            engine=engine if with_engine else None,
            syncs_adapter_only=True,
            fused_parts=FUSED_PARTS,
            notes=NOTES if with_engine else NOTES[:1],
        )

    def _lengths(self, settings: Settings) -> tuple[int, int]:
        if self.online:
            return count_of(settings, "max_prompt_length"), count_of(settings, "max_completion_length")
        return max(1, count_of(settings, "max_seq_length") - 1), 1


def _grpo_refusals(settings: Settings, total: int) -> Iterator[str]:
    generations = count_of(settings, "num_generations")
    if generations < 2:
        yield f"num_generations must be at least 2 to compare completions of a prompt, and is {generations}."
    elif total % generations:
        yield (
            f"per_device_train_batch_size x gradient_accumulation_steps is {total}, not divisible by "
            f"num_generations={generations}: unsloth would silently make the micro-batch {generations}."
        )
    if settings.get("vllm_standby") and not settings.get("fast_inference"):
        yield "vllm_standby puts vLLM to sleep, and without fast_inference=true there is none."
    if settings.get("fast_inference") and settings.get("full_finetuning"):
        yield "fast_inference shares frozen weights with vLLM, and full_finetuning changes them: use --tuning lora or qlora."


def _is_read(name: str, settings: Settings) -> bool:
    """Return False for a setting without effect: it would separate equal candidates."""
    if name in (*OF_THE_ENGINE[1:], "vllm_standby"):
        return bool(settings.get("fast_inference"))
    return not (name == "lora_rank" and settings.get("full_finetuning"))


def _rows(settings: Settings) -> int:
    return count_of(settings, "per_device_train_batch_size") * count_of(settings, "gradient_accumulation_steps")


def _literal(value: object) -> str:
    return pprint.pformat(value, width=100, sort_dicts=False)


TRAINERS = (Unsloth("sft"), Unsloth("grpo"))

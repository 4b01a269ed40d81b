"""ms-swift: `swift sft` and `swift rlhf --rlhf_type grpo`, started by their command line.

Read from ms-swift 4.6.0 (`swift/arguments`, `swift/rlhf_trainers`, `swift/trainers/patcher.py`). It logs to `logging.jsonl` in
its output folder; completions of GRPO are counted there by their mean length, and rows of SFT by the tokens that went in.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import ClassVar

from autotune.candidate import Candidate, Knobs, KnobValue
from autotune.composition import Composition
from autotune.errors import IllegalConfiguration
from autotune.trainers.base import Job, ProbePlan, RowLengths, count_of, other_global_batch
from autotune.trainers.generic_step import STAND_IN, compose, trace_request
from autotune.trainers.launching import OF_TRANSFORMERS, OUT, Figures, Launch, Launched, ToldSettings
from autotune.trainers.rows import row_lengths
from autotune.trainers.swift_step import served, step, training_gpus

Settings = Mapping[str, KnobValue]

STAGES = (None, "zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
ENGINE = (
    "vllm_mode", "vllm_gpu_memory_utilization", "vllm_max_model_len", "vllm_tensor_parallel_size", "vllm_enable_lora",
    "sleep_level", "offload_model", "offload_optimizer", "server_gpus",
)  # fmt: skip
OF_THE_SERVER = ("vllm_gpu_memory_utilization", "vllm_max_model_len", "vllm_tensor_parallel_size", "vllm_enable_lora")
"""What `swift rollout` is told where vLLM is a server of its own."""

MADE_UP_ROWS = 512
PORT = "8000"

COMMON: Mapping[str, KnobValue] = {
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "gradient_checkpointing": True, "tuner_type": "lora",
    "lora_rank": 8, "torch_dtype": "bfloat16", "max_length": 2048, "deepspeed": None, "optim": "adamw_torch_fused",
    "attn_impl": None, "use_liger_kernel": False, "model_type": None, "template": None, "quant_method": None, "quant_bits": None,
}  # fmt: skip
BY_METHOD: Mapping[str, Mapping[str, KnobValue]] = {
    "sft": {"packing": False, "padding_free": False},
    "grpo": {
        "num_generations": 8, "max_completion_length": 512, "beta": 0.04, "use_vllm": True, "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.9, "vllm_max_model_len": None, "vllm_tensor_parallel_size": 1, "vllm_enable_lora": False,
        "sleep_level": 0, "offload_model": False, "offload_optimizer": False, "move_model_batches": None,
        "server_gpus": 1,
    },
}  # fmt: skip


CANONICAL: Mapping[str, Mapping[str, str]] = {
    "sft": {"lora_r": "lora_rank"},
    "grpo": {
        "lora_r": "lora_rank", "max_prompt_length": "max_length", "max_completion_length": "max_completion_length",
        "num_generations": "num_generations",
    },
}  # fmt: skip
"""`max_length` is a whole row of SFT, and the prompt of GRPO."""


class Swift(Launched):
    """One of ms-swift's methods."""

    name = "swift"
    needs = ("swift",)
    requires: ClassVar[Mapping[str, str]] = {"swift": "ms-swift>=4.6,<4.7"}
    watch = OF_TRANSFORMERS
    trace_adapter = STAND_IN

    def __init__(self, method: str) -> None:
        self.method = method
        self.space = f"swift-{method}"
        self.defaults = {**COMMON, **BY_METHOD[method]}
        self.canonical = CANONICAL[method]

    def complete(self, knobs: Knobs, job: Job) -> Candidate:
        held = {self.canonical.get(name, name): value for name, value in job.workload.held.items()}
        held = {name: value for name, value in held.items() if name in self.defaults}
        tuning: dict[str, KnobValue] = {"tuner_type": "full" if job.workload.tuning == "full" else "lora"}
        if job.workload.tuning == "qlora":
            tuning |= {"quant_method": "bnb", "quant_bits": 4}
        precision: dict[str, KnobValue] = {"torch_dtype": "float32"} if job.hardware.kind == "cpu" else {}
        settings = {**self.defaults, **precision, **tuning, **held, **knobs}
        if "gradient_accumulation_steps" not in {**held, **knobs} and job.workload.global_batch:
            settings["gradient_accumulation_steps"] = max(1, job.workload.global_batch // self._rows(settings, job))
        return Candidate(
            knobs=knobs, settings={name: value for name, value in settings.items() if _matters(name, settings)},
            load=self.load_of(settings, job),
        )  # fmt: skip

    def _rows(self, settings: Settings, job: Job) -> int:
        """Of one micro-step, over all GPUs."""
        return max(1, count_of(settings, "per_device_train_batch_size") * max(1, training_gpus(settings, job.hardware.count)))

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
        on_cpu = job.hardware.kind == "cpu"
        total = self._rows(settings, job) * count_of(settings, "gradient_accumulation_steps")
        if "load_in_4bit" in settings:
            yield "load_in_4bit is TRL's; ms-swift says quant_method=bnb and quant_bits=4, or give --tuning qlora."
        if (other := other_global_batch(job, "micro-batch x GPUs x gradient_accumulation_steps", total)) is not None:
            yield other
        if settings.get("deepspeed") not in STAGES:
            yield f"deepspeed must be one of {', '.join(str(stage) for stage in STAGES)}, and is {settings.get('deepspeed')!r}."
        if on_cpu and (settings.get("deepspeed") or settings.get("use_vllm") or settings.get("quant_bits")):
            yield "deepspeed, use_vllm and quantised weights need GPUs: name some with --gpus."
        if settings.get("quant_bits") and settings.get("tuner_type") == "full":
            yield "quantised weights can only be trained through an adapter: tuner_type must be lora."
        if served(settings) and not 0 < count_of(settings, "server_gpus") < job.hardware.count:
            yield (
                f"server_gpus ({settings.get('server_gpus')}) are the last of the {job.hardware.count} GPUs, must be at least "
                "one, and must leave one to train."
            )
        if settings.get("use_liger_kernel") and settings.get("padding_free"):
            yield "use_liger_kernel cannot go with padding_free."
        if (settings.get("packing") or settings.get("padding_free")) and on_cpu:
            yield "packing and padding_free need flash attention, and that a GPU."
        if self.method == "grpo":
            yield from _groups(settings, total)

    def launch(self, candidate: Candidate, job: Job, plan: ProbePlan | None = None) -> Launch:
        settings, files = candidate.settings, {}
        named: dict[str, object] = {"model": str(job.workload.model.folder or job.workload.model.name), **settings}
        dataset = job.workload.dataset
        if dataset is None:
            files, dataset = {"rows.jsonl": self._made_up(settings)}, f"{OUT}/rows.jsonl"
        named |= {"dataset": dataset, "output_dir": f"{OUT}/output", "add_version": False}
        grpo = self.method == "grpo"
        named |= {"rlhf_type": "grpo", "reward_funcs": "format"} if grpo else {"include_num_input_tokens_seen": True}
        if job.hardware.kind == "cpu":
            named |= {"use_cpu": True, "bf16": False}
        if plan is not None:
            # A probe is to see the longest rows, which ms-swift leaves out of supervised training unless told otherwise.
            named |= _bounded(plan) if grpo else {**_bounded(plan), "truncation_strategy": "right"}
        ranks = max(1, training_gpus(settings, job.hardware.count))
        environment = {"NPROC_PER_NODE": str(ranks), "USE_HF": "1"} if ranks > 1 else {"USE_HF": "1"}
        if served(settings):
            files |= {"rollout.sh": _server(named, job)}
            environment["CUDA_VISIBLE_DEVICES"] = _numbers(0, ranks)
            named = {name: value for name, value in named.items() if name not in OF_THE_SERVER or name == "vllm_enable_lora"}
            named |= {"vllm_server_host": "127.0.0.1", "vllm_server_port": PORT}
        words = _words({name: value for name, value in named.items() if name != "server_gpus"})
        command = "rlhf" if self.method == "grpo" else "sft"
        return Launch(
            argv=(str(job.workload.python), "-m", "swift.cli.main", command, *words),
            figures=self._figures(settings, job),
            files=files,
            environment=environment,
            effective=ToldSettings(kind="json", file=f"{OUT}/output/args.json"),
        )

    def probe_request(self, candidate: Candidate, job: Job, plan: ProbePlan) -> Mapping[str, object]:
        if served(candidate.settings):
            raise IllegalConfiguration(
                "A probe starts no vLLM server of ms-swift's.", way_out="Ask `autotune predict`, or --hold vllm_mode=colocate."
            )
        return super().probe_request(candidate, job, plan)

    def _figures(self, settings: Settings, job: Job) -> Figures:
        """The seconds are those from one step's line to the next: its own `train_speed` is a mean over the whole run."""
        file = f"{OUT}/output/logging.jsonl"
        if self.method == "sft":
            return Figures(kind="json", file=file, keys={"tokens_so_far": ("num_input_tokens_seen",)})
        rows = self._rows(settings, job) * count_of(settings, "gradient_accumulation_steps")
        return Figures(kind="json", file=file, keys={"tokens": ("completions/mean_length",)}, times=rows)

    def _made_up(self, settings: Settings) -> str:
        """Rows that differ, of at least the longest length: a word is at least one token."""
        words = count_of(settings, "max_length") // (1 if self.method == "sft" else 8)
        rows = []
        for number in range(MADE_UP_ROWS):
            text = " ".join(str((number * 7919 + word * 31) % 9973) for word in range(words))
            answer = [{"role": "assistant", "content": text}] if self.method == "sft" else []
            said = "Count." if self.method == "sft" else text
            rows.append(json.dumps({"messages": [{"role": "user", "content": said}, *answer]}))
        return "\n".join(rows) + "\n"


def _groups(settings: Settings, total: int) -> Iterator[str]:
    generations = count_of(settings, "num_generations")
    if generations < 2:
        yield f"num_generations must be at least 2, to compare completions of one prompt, and is {generations}."
    elif total % generations:
        yield f"the generation batch of {total} must be divisible by num_generations ({generations}): groups must be whole."
    if settings.get("vllm_enable_lora") and settings.get("tuner_type") == "full":
        yield "vllm_enable_lora pushes an adapter into the engine, and full tuning has none."
    if settings.get("sleep_level") and settings.get("vllm_mode") != "colocate":
        yield "sleep_level works with vllm_mode=colocate: a server shares its GPUs with nobody."


def _bounded(plan: ProbePlan) -> dict[str, object]:
    steps = max(plan.optimizer_steps, plan.warmup_cycles + plan.timed_cycles) + 1
    return {
        "max_steps": steps, "logging_steps": 1, "save_strategy": "no", "eval_strategy": "no", "report_to": "none",
        "learning_rate": 0.0, "split_dataset_ratio": 0.0,
    }  # fmt: skip


def _matters(name: str, settings: Settings) -> bool:
    """Settings that nothing reads would tell equal candidates apart."""
    if name in ENGINE and not settings.get("use_vllm"):
        return False
    return not (name == "lora_rank" and settings.get("tuner_type") == "full")


def _server(named: Mapping[str, object], job: Job) -> str:
    """What starts vLLM on the last GPUs, before the training is."""
    ranks = training_gpus(named, job.hardware.count)  # type: ignore[arg-type]
    told = {"model": named["model"], **{name: named.get(name) for name in OF_THE_SERVER}, "port": PORT}
    return (
        "#!/usr/bin/env bash\n# Start this first: vLLM, on the GPUs that do not train.\n"
        f"export USE_HF=1 CUDA_VISIBLE_DEVICES={_numbers(ranks, job.hardware.count)}\n"
        f'exec {shlex.join([str(job.workload.python), "-m", "swift.cli.main", "rollout", *_words(told)])} "$@"\n'
    )


def _numbers(first: int, end: int) -> str:
    return ",".join(str(number) for number in range(first, end))


def _words(named: Mapping[str, object]) -> list[str]:
    return [word for name, value in named.items() if value is not None for word in (f"--{name}", _spelt(value))]


def _spelt(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


TRAINERS = (Swift("sft"), Swift("grpo"))

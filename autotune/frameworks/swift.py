"""ms-swift: `swift sft` and `swift rlhf --rlhf_type grpo`, started by their command line.

Written for ms-swift 4.6.0 (`swift/arguments`, `swift/rlhf_trainers`, `swift/trainers/patcher.py`).
It logs to `logging.jsonl` in its output folder: mean completion length for GRPO, input tokens for
SFT. Assumptions of the stand-in step:

- Logits of the completion alone (`logits_to_keep`), in the model's precision, and their log-softmax.
- A vLLM server has GPUs of its own. A colocated engine shares the trainer's processes and contexts.
- Weights are synchronised with vLLM at once with the adapter merged, unless `vllm_enable_lora`
  sends the adapter alone or `move_model_batches` splits the weights.
- Prompts are as long as `max_length`. `vllm_max_model_len` bounds generation, not training.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping

from autotune.core.candidate import Candidate, Knobs, KnobValue
from autotune.core.composition import EngineSettings, Generation
from autotune.core.errors import IllegalConfiguration
from autotune.core.probe_plan import ProbePlan
from autotune.core.task import Task
from autotune.frameworks.base import Settings, as_word, count_of, model_path, other_global_batch, share_of
from autotune.frameworks.launched_run import (
    OF_TRANSFORMERS,
    OUT,
    SYNTHETIC_ROWS,
    Figures,
    Launch,
    Launched,
    ReportedSettings,
    probe_steps,
)  # fmt: skip
from autotune.frameworks.settings_table import read_defaults
from autotune.frameworks.stand_in_step import STAND_IN, OtherModel, StandInSpec, gptq_bits

ENGINE = (
    "vllm_mode", "vllm_gpu_memory_utilization", "vllm_max_model_len", "vllm_tensor_parallel_size", "vllm_enable_lora",
    "sleep_level", "offload_model", "offload_optimizer", "server_gpus",
)  # fmt: skip
OF_THE_SERVER = ("vllm_gpu_memory_utilization", "vllm_max_model_len", "vllm_tensor_parallel_size", "vllm_enable_lora")
"""Settings of `swift rollout`, which starts the vLLM server."""

SHARDINGS: Mapping[KnobValue, tuple[str, tuple[str, ...]]] = {
    None: ("ddp", ()),
    "zero0": ("ddp", ()),
    "zero1": ("zero1", ()),
    "zero2": ("zero2", ()),
    "zero2_offload": ("zero2", ("offload_optimizer",)),
    "zero3": ("zero3", ()),
    "zero3_offload": ("zero3", ("offload_optimizer", "offload_param")),
}
"""Value of `deepspeed` -> sharding of the training state, and its offload options."""

CANONICAL: Mapping[str, Mapping[str, str]] = {
    "sft": {"lora_r": "lora_rank"},
    "grpo": {
        "lora_r": "lora_rank", "max_prompt_length": "max_length", "max_completion_length": "max_completion_length",
        "num_generations": "num_generations",
    },
}  # fmt: skip
"""`max_length` bounds a whole row in SFT, and the prompt in GRPO."""

N_SYNTHETIC_ROWS = 512
MAX_NUM_SEQS = 256
"""Default of `swift rollout` and of vLLM."""

PORT = "8000"


def served(settings: Mapping[str, object]) -> bool:
    """Return True if vLLM is a server on GPUs of its own."""
    return bool(settings.get("use_vllm")) and settings.get("vllm_mode") == "server"


def ranks_of(settings: Mapping[str, object], gpus: int) -> int:
    """Return the number of training processes: one per GPU, without those of the server."""
    return max(1, gpus - (count_of(settings, "server_gpus") if served(settings) else 0))


class Swift(Launched):
    """Method of ms-swift."""

    name = "swift"
    needs = ("swift",)
    requires: Mapping[str, str] = {"swift": "ms-swift>=4.6,<4.7"}
    watch = OF_TRANSFORMERS
    trace_adapter = STAND_IN
    measures_rows = True

    def __init__(self, method: str) -> None:
        self.method, self.online = method, method == "grpo"
        self.space = f"swift-{method}"
        self.defaults = read_defaults("swift.yaml", method)
        self.canonical = CANONICAL[method]

    def complete(self, knobs: Knobs, task: Task) -> Candidate:
        given = {**self.held(task), **knobs}
        tuning: dict[str, KnobValue] = {"tuner_type": "full" if task.workload.tuning == "full" else "lora"}
        if task.workload.tuning == "qlora":
            tuning |= {"quant_method": "bnb", "quant_bits": 4}
        precision: dict[str, KnobValue] = {"torch_dtype": "float32"} if task.hardware.kind == "cpu" else {}
        settings = {**self.defaults, **precision, **tuning, **given}
        if "gradient_accumulation_steps" not in given and task.workload.global_batch:
            settings["gradient_accumulation_steps"] = max(1, task.workload.global_batch // self._rows(settings, task))
        return Candidate(
            knobs=knobs, settings={name: value for name, value in settings.items() if _is_read(name, settings)},
            load=self.load_of(settings, task),
        )  # fmt: skip

    def _rows(self, settings: Settings, task: Task) -> int:
        """Return the rows of one micro-step over all GPUs."""
        return max(1, count_of(settings, "per_device_train_batch_size") * ranks_of(settings, task.hardware.count))

    def refusals(self, settings: Settings, task: Task) -> Iterator[str]:
        on_cpu, gpus = task.hardware.kind == "cpu", task.hardware.count
        total = self._rows(settings, task) * count_of(settings, "gradient_accumulation_steps")
        if "load_in_4bit" in settings:
            yield "load_in_4bit belongs to TRL. Use quant_method=bnb and quant_bits=4, or --tuning qlora."
        if (other := other_global_batch(task, "micro-batch x GPUs x gradient_accumulation_steps", total)) is not None:
            yield other
        if settings.get("deepspeed") not in SHARDINGS:
            yield f"deepspeed must be one of {', '.join(map(str, SHARDINGS))}, and is {settings.get('deepspeed')!r}."
        if on_cpu and (settings.get("deepspeed") or settings.get("use_vllm") or settings.get("quant_bits")):
            yield "deepspeed, use_vllm and quantised weights need GPUs: name some with --gpus."
        if settings.get("quant_bits") and settings.get("tuner_type") == "full":
            yield "quantised weights can only be trained through an adapter: tuner_type must be lora."
        if served(settings) and not 0 < count_of(settings, "server_gpus") < gpus:
            yield f"server_gpus={settings.get('server_gpus')} must be at least 1, and of {gpus} GPUs it must leave one to train."
        if settings.get("use_liger_kernel") and settings.get("padding_free"):
            yield "use_liger_kernel excludes padding_free."
        if (settings.get("packing") or settings.get("padding_free")) and on_cpu:
            yield "packing and padding_free need flash attention, which needs a GPU."
        if self.online:
            yield from _grpo_refusals(settings, total)

    def launch(self, candidate: Candidate, task: Task, plan: ProbePlan | None = None) -> Launch:
        settings, files = candidate.settings, {}
        named: dict[str, object] = {"model": model_path(task), **settings}
        # 1. Data.
        dataset = task.workload.dataset
        if dataset is None:
            files, dataset = {SYNTHETIC_ROWS: self._synthetic_rows(settings)}, f"{OUT}/{SYNTHETIC_ROWS}"
        named |= {"dataset": dataset, "output_dir": f"{OUT}/output", "add_version": False}
        named |= {"rlhf_type": "grpo", "reward_funcs": "format"} if self.online else {"include_num_input_tokens_seen": True}
        if task.hardware.kind == "cpu":
            named |= {"use_cpu": True, "bf16": False}
        # 2. Bounds of a probe. It must train on the longest rows, which SFT drops by default.
        if plan is not None:
            named |= {
                "max_steps": probe_steps(plan) + 1, "logging_steps": 1, "save_strategy": "no", "eval_strategy": "no",
                "report_to": "none", "learning_rate": 0.0, "split_dataset_ratio": 0.0,
            } | ({} if self.online else {"truncation_strategy": "right"})  # fmt: skip
        # 3. Ranks, and the vLLM server.
        ranks = ranks_of(settings, task.hardware.count)
        environment = {"NPROC_PER_NODE": str(ranks), "USE_HF": "1"} if ranks > 1 else {"USE_HF": "1"}
        if served(settings):
            files |= {"rollout.sh": _server_script(named, task)}
            environment["CUDA_VISIBLE_DEVICES"] = _gpu_list(0, ranks)
            named = {name: value for name, value in named.items() if name not in OF_THE_SERVER or name == "vllm_enable_lora"}
            named |= {"vllm_server_host": "127.0.0.1", "vllm_server_port": PORT}
        words = _words({name: value for name, value in named.items() if name != "server_gpus"})
        return Launch(
            argv=(str(task.workload.python), "-m", "swift.cli.main", "rlhf" if self.online else "sft", *words),
            figures=self._figures(settings, task),
            files=files,
            environment=environment,
            effective=ReportedSettings(kind="json", file=f"{OUT}/output/args.json"),
        )

    def probe_request(self, candidate: Candidate, task: Task, plan: ProbePlan) -> Mapping[str, object]:
        if served(candidate.settings):
            raise IllegalConfiguration(
                "vllm_mode=server: a probe cannot start ms-swift's vLLM server.",
                way_out="Use `autotune predict`, or --hold vllm_mode=colocate.",
            )
        return super().probe_request(candidate, task, plan)

    def _figures(self, settings: Settings, task: Task) -> Figures:
        """Seconds are the time between log lines: `train_speed` is a mean over the whole run."""
        file = f"{OUT}/output/logging.jsonl"
        if not self.online:
            return Figures(kind="json", file=file, keys={"tokens_so_far": ("num_input_tokens_seen",)})
        rows = self._rows(settings, task) * count_of(settings, "gradient_accumulation_steps")
        return Figures(kind="json", file=file, keys={"tokens": ("completions/mean_length",)}, times=rows)

    def _synthetic_rows(self, settings: Settings) -> str:
        """Return different rows of at least the longest length: one word is at least one token."""
        words = count_of(settings, "max_length") // (8 if self.online else 1)
        rows = []
        for number in range(N_SYNTHETIC_ROWS):
            text = " ".join(str((number * 7919 + word * 31) % 9973) for word in range(words))
            answer = [] if self.online else [{"role": "assistant", "content": text}]
            prompt = text if self.online else "Count."
            rows.append(json.dumps({"messages": [{"role": "user", "content": prompt}, *answer]}))
        return "\n".join(rows) + "\n"

    def step(self, settings: Settings, task: Task) -> StandInSpec:
        ranks = ranks_of(settings, task.hardware.count)
        micro = count_of(settings, "per_device_train_batch_size")
        accumulation = count_of(settings, "gradient_accumulation_steps") or 1
        prompt, completion = self._lengths(settings)
        sharding, offloads = SHARDINGS.get(settings.get("deepspeed"), ("ddp", ()))
        deepspeed = sharding.startswith("zero")
        with_adapter = settings.get("tuner_type") != "full"
        engine = _engine(settings, task, prompt + completion, micro * accumulation) if self.online else None
        has_reference = self.online and not with_adapter and settings.get("beta")
        reference = OtherModel(role="reference", model=task.workload.model.name, whole=sharding != "zero3")
        return StandInSpec(
            prompt_length=prompt,
            completion_length=completion,
            tokens=micro * (prompt + completion),
            score_tokens=micro * (prompt + completion),
            micro_batch=micro,
            accumulation=accumulation,
            generation_batch=micro * ranks * accumulation if self.online else 0,
            ranks=ranks,
            sharded_by=sharding if ranks > 1 or deepspeed else "none",
            options={name: {"device": "cpu"} for name in offloads},
            mixed=not deepspeed,
            adapter=_adapter(settings) if with_adapter else None,
            quantised=settings.get("quant_bits") == 4,
            loss="logprobs_plain" if self.online else "causal_lm",
            loss_options={"completion_alone": True} if self.online else {},
            checkpointing=bool(settings.get("gradient_checkpointing")),
            optimizer=str(settings.get("optim")),
            attention=str(settings.get("attn_impl") or "sdpa"),
            others=(reference,) if has_reference else (),
            generation=self._generation(settings),
            engine=engine,
            offloaded_in_rollout=tuple(_offloaded(settings)),
            syncs_adapter_only=with_adapter and bool(settings.get("vllm_enable_lora")),
            sync_parts=count_of(settings, "move_model_batches") or 1,
            notes=tuple(self._notes(settings)),
        )

    def _lengths(self, settings: Settings) -> tuple[int, int]:
        """Return the longest prompt and completion: vLLM ends a completion at its window."""
        prompt = count_of(settings, "max_length")
        if not self.online:
            return max(1, prompt - 1), 1
        completion, window = count_of(settings, "max_completion_length"), count_of(settings, "vllm_max_model_len")
        if not settings.get("use_vllm") or not window or prompt + completion <= window:
            return prompt, completion
        return prompt, max(1, min(completion, window - prompt))

    def _generation(self, settings: Settings) -> Generation:
        if not self.online:
            return "none"
        return "trainer" if not settings.get("use_vllm") else "server" if served(settings) else "engine"

    def _notes(self, settings: Settings) -> Iterator[str]:
        yield "modelled on ms-swift 4.6.0; prompts up to max_length"
        if self.online and served(settings):
            yield f"the last {count_of(settings, 'server_gpus')} GPUs belong to the vLLM server; the others train"


def _grpo_refusals(settings: Settings, total: int) -> Iterator[str]:
    generations = count_of(settings, "num_generations")
    if generations < 2:
        yield f"num_generations must be at least 2 to compare completions of a prompt, and is {generations}."
    elif total % generations:
        yield f"the generation batch of {total} must be divisible by num_generations ({generations}): groups must be whole."
    if settings.get("vllm_enable_lora") and settings.get("tuner_type") == "full":
        yield "vllm_enable_lora sends an adapter to the engine; full tuning has none."
    if settings.get("sleep_level") and settings.get("vllm_mode") != "colocate":
        yield "sleep_level requires vllm_mode=colocate: a server has its GPUs to itself."


def _is_read(name: str, settings: Settings) -> bool:
    """Return False for a setting without effect: it would separate equal candidates."""
    if name in ENGINE and not settings.get("use_vllm"):
        return False
    return not (name == "lora_rank" and settings.get("tuner_type") == "full")


def _engine(settings: Settings, task: Task, longest: int, rows: int) -> EngineSettings | None:
    if not settings.get("use_vllm") or served(settings):
        return None
    return EngineSettings(
        utilization=share_of(settings, "vllm_gpu_memory_utilization"),
        max_model_length=count_of(settings, "vllm_max_model_len") or longest,
        max_num_seqs=rows or MAX_NUM_SEQS,
        tensor_parallel=count_of(settings, "vllm_tensor_parallel_size") or 1,
        sleep=bool(settings.get("sleep_level")),
        quantised_bits=4 if settings.get("quant_bits") == 4 else gptq_bits(task.workload.model.config),
    )


def _adapter(settings: Settings) -> Mapping[str, object]:
    rank = count_of(settings, "lora_rank")
    return {"lora_r": rank, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": "all-linear"}


def _offloaded(settings: Settings) -> Iterator[str]:
    if settings.get("use_vllm") and settings.get("offload_model"):
        yield from ("weights", "adapters")
    if settings.get("use_vllm") and settings.get("offload_optimizer"):
        yield "optimizer"


def _server_script(named: Mapping[str, object], task: Task) -> str:
    """Return the script that starts vLLM on the last GPUs, before training."""
    gpus = task.hardware.count
    options = {"model": named["model"], **{name: named.get(name) for name in OF_THE_SERVER}, "port": PORT}
    return (
        "#!/usr/bin/env bash\n# Start this first: vLLM, on the GPUs that do not train.\n"
        f"export USE_HF=1 CUDA_VISIBLE_DEVICES={_gpu_list(ranks_of(named, gpus), gpus)}\n"
        f'exec {shlex.join([str(task.workload.python), "-m", "swift.cli.main", "rollout", *_words(options)])} "$@"\n'
    )


def _gpu_list(first: int, end: int) -> str:
    return ",".join(map(str, range(first, end)))


def _words(named: Mapping[str, object]) -> list[str]:
    return [word for name, value in named.items() if value is not None for word in (f"--{name}", as_word(value))]


TRAINERS = (Swift("sft"), Swift("grpo"))

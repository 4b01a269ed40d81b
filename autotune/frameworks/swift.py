"""ms-swift: `swift sft` and `swift rlhf --rlhf_type grpo`, started by their command line.

Written for ms-swift 4.6.0 (`swift/arguments`, `swift/rlhf_trainers`, `swift/trainers/patcher.py`).
It logs to `logging.jsonl`: completion lengths (GRPO), input tokens (SFT). The stand-in step
assumes:

- Logits of the completion alone (`logits_to_keep`), in the model's precision, and their log-softmax.
- A vLLM server has GPUs of its own. A colocated engine shares the trainer's processes and contexts.
- Weights are synchronised with vLLM at once with the adapter merged, unless `vllm_enable_lora` sends
  the adapter alone (all once before) or `move_model_batches` splits the weights.
- Prompts are as long as `max_length`. `vllm_max_model_len` bounds generation, not training.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from autotune.core.composition import EngineSettings
from autotune.core.errors import IllegalConfiguration
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate, KnobValue
from autotune.frameworks import stand_in_step
from autotune.frameworks.base import (
    Settings,
    as_word,
    count_of,
    ddp_options,
    gptq_bits,
    model_path,
    share_of,
)
from autotune.frameworks.launched_run import (
    OUT,
    SYNTHETIC_ROWS,
    Launch,
    ReportedSettings,
    probe_steps,
    synthetic_texts,
)
from autotune.frameworks.stand_in_step import OtherModel
from autotune.frameworks.transformers_trainer import N_SYNTHETIC_ROWS, TransformersTrainer

_SERVED = (
    "gpu_memory_utilization",
    "max_model_len",
    "tensor_parallel_size",
    "enable_lora",
    "enable_expert_parallel",
)
OF_THE_SERVER = tuple(
    f"vllm_{name}" for name in _SERVED
)  # settings of `swift rollout`, which starts the vLLM server
ATTENTION: Mapping[KnobValue, str] = {None: "sdpa", "flash_attn": "flash_attention_2"}
"""Name of an attention -> transformers'; every other name is the same."""

ADAPTER = {"lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": "all-linear"}
"""Defaults of `swift/arguments/tuner_args.py`."""

OFFLOADED = {
    "weights": "offload_model",
    "adapters": "offload_model",
    "optimizer": "offload_optimizer",
}
"""Part of the policy -> setting that moves it to the host during a rollout."""

PORT = "8000"


def served(settings: Mapping[str, object]) -> bool:
    """Return True if vLLM is a server on GPUs of its own."""
    return bool(settings.get("use_vllm")) and settings.get("vllm_mode") == "server"


class Swift(TransformersTrainer):
    """Method of ms-swift."""

    name = "swift"

    def ranks(self, settings: Settings, gpus: int) -> int:
        """Return the number of training processes: one per GPU, without those of the server."""
        return max(1, gpus - (count_of(settings, "server_gpus") if served(settings) else 0))

    def derived(self, settings: Settings, task: Task) -> Mapping[str, KnobValue]:
        on_cpu = task.hardware.kind == "cpu" and "torch_dtype" not in self.held(task)
        return {"torch_dtype": "float32"} if on_cpu else {}

    def launch(self, candidate: Candidate, task: Task, plan: ProbePlan | None = None) -> Launch:
        settings, dataset, files = candidate.settings, task.workload.dataset, {}
        named: dict[str, object] = {"model": model_path(task), **settings}
        # 1. Data.
        if dataset is None:
            files, dataset = (
                {SYNTHETIC_ROWS: self._synthetic_rows(settings)},
                f"{OUT}/{SYNTHETIC_ROWS}",
            )
        named |= {"dataset": dataset, "output_dir": f"{OUT}/output", "add_version": False}
        named |= (
            {"rlhf_type": "grpo", "reward_funcs": "format"}
            if self.online
            else {"include_num_input_tokens_seen": True}
        )
        if task.hardware.kind == "cpu":
            named |= {"use_cpu": True, "bf16": False}
        # 2. Bounds of a probe. It must train on the longest rows, which SFT drops by default.
        if plan is not None:
            named |= {
                "max_steps": probe_steps(plan) + 1,
                "logging_steps": 1,
                "save_strategy": "no",
                "eval_strategy": "no",
                "report_to": "none",
                "learning_rate": 0.0,
                "split_dataset_ratio": 0.0,
            } | ({} if self.online else {"truncation_strategy": "right"})
        # 3. Ranks, and the vLLM server.
        ranks = self.ranks(settings, task.hardware.count)
        environment = (
            {"NPROC_PER_NODE": str(ranks), "USE_HF": "1"} if ranks > 1 else {"USE_HF": "1"}
        )
        if served(settings):
            files |= {"rollout.sh": _server_script(named, task, ranks)}
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(ranks)))
            named = {
                name: value
                for name, value in named.items()
                if name not in OF_THE_SERVER or name == "vllm_enable_lora"
            }
            named |= {"vllm_server_host": "127.0.0.1", "vllm_server_port": PORT}
        named.pop("server_gpus", None)
        return Launch(
            argv=(
                str(task.workload.python),
                "-m",
                "swift.cli.main",
                "rlhf" if self.online else "sft",
                *_words(named),
            ),
            figures=self.figures(settings, task, "output/logging.jsonl", "num_input_tokens_seen"),
            files=files,
            environment=environment,
            effective=ReportedSettings(kind="json", file=f"{OUT}/output/args.json"),
        )

    def probe_request(
        self, candidate: Candidate, task: Task, plan: ProbePlan
    ) -> Mapping[str, object]:
        if served(candidate.settings):
            raise IllegalConfiguration(
                "vllm_mode=server: a probe cannot start ms-swift's vLLM server.",
                way_out="Use `autotune predict`, or --hold vllm_mode=colocate.",
            )
        return super().probe_request(candidate, task, plan)

    def _synthetic_rows(self, settings: Settings) -> str:
        """Return different rows of at least the longest length: one word is at least one token."""
        texts = synthetic_texts(
            N_SYNTHETIC_ROWS, count_of(settings, "max_length") // (8 if self.online else 1)
        )
        rows = [
            (("user", text),) if self.online else (("user", "Count."), ("assistant", text))
            for text in texts
        ]
        messages = ([{"role": role, "content": content} for role, content in row] for row in rows)
        return "".join(json.dumps({"messages": row}) + "\n" for row in messages)

    def composition(self, settings: Settings, task: Task) -> Mapping[str, Any]:
        ranks, rows = self.ranks(settings, task.hardware.count), self.total_rows(settings, task)
        sharding, offloads = _sharding(str(settings.get("deepspeed") or "zero0"))
        with_adapter, deepspeed = settings.get("tuner_type") != "full", sharding.startswith("zero")
        reference = OtherModel(
            role="reference", model=task.workload.model.name, whole=sharding != "zero3"
        )
        generation = (
            "trainer"
            if not settings.get("use_vllm")
            else "server"
            if served(settings)
            else "engine"
        )
        options = self.facts.deepspeed.get(sharding) or ddp_options(settings, adapter=with_adapter)
        # A colocated engine, or `swift rollout` with one replica per share of tensor_parallel GPUs.
        window, share = (
            count_of(settings, "vllm_max_model_len"),
            share_of(settings, "vllm_gpu_memory_utilization"),
        )
        window, parallel = (
            window or sum(self.lengths(settings)),
            count_of(settings, "vllm_tensor_parallel_size") or 1,
        )
        engine = EngineSettings(
            utilization=share,
            max_model_length=window,
            max_num_seqs=max(1, rows // ranks),
            tensor_parallel=parallel,
            sleep=bool(settings.get("sleep_level")),
            quantised_bits=(
                4 if settings.get("quant_bits") == 4 else gptq_bits(task.workload.model.config)
            ),
        )
        server = stand_in_step.served(
            task.hardware,
            gpus=count_of(settings, "server_gpus"),
            tensor_parallel=parallel,
            window=window,
            dtype="bfloat16",
            utilization=share or stand_in_step.SHARE,
        )
        return {
            "sharded_by": sharding if ranks > 1 or deepspeed else "none",
            "options": {**options, **{name: {"device": "cpu"} for name in offloads}},
            "mixed": not deepspeed,
            "adapter": (
                {"lora_r": count_of(settings, "lora_rank"), **ADAPTER} if with_adapter else None
            ),
            "quantised": settings.get("quant_bits") == 4,
            "checkpointing": bool(settings.get("gradient_checkpointing")),
            "attention": ATTENTION.get(attention := settings.get("attn_impl"), str(attention)),
            "others": (
                (reference,) if self.online and not with_adapter and settings.get("beta") else ()
            ),
            "generation": generation if self.online else "none",
            "engine": engine if self.online and generation == "engine" else None,
            "split": server if self.online and generation == "server" else None,
            "offloaded_in_rollout": tuple(
                part for part, name in OFFLOADED.items() if settings.get(name)
            ),
            "syncs_adapter_only": with_adapter and bool(settings.get("vllm_enable_lora")),
            "first_sync_is_whole": True,
            "sync_parts": count_of(settings, "move_model_batches") or 1,
        }

    def lengths(self, settings: Settings) -> tuple[int, int]:
        """Return the longest prompt and completion: vLLM ends a completion at its window."""
        prompt = count_of(settings, "max_length")
        if not self.online:
            return max(1, prompt - 1), 1
        completion, window = (
            count_of(settings, "max_completion_length"),
            count_of(settings, "vllm_max_model_len"),
        )
        if not settings.get("use_vllm") or not window or prompt + completion <= window:
            return prompt, completion
        return prompt, max(1, min(completion, window - prompt))


def _sharding(deepspeed: str) -> tuple[str, tuple[str, ...]]:
    """Return the sharding of the training state and its offload options."""
    kind, _, offload = deepspeed.partition("_")
    offloads = ("offload_optimizer", "offload_param") if kind == "zero3" else ("offload_optimizer",)
    return "ddp" if kind == "zero0" else kind, offloads if offload else ()


def _server_script(named: Mapping[str, object], task: Task, ranks: int) -> str:
    """Return the script that starts vLLM on the last GPUs, before training."""
    options = {
        name: named.get(name) for name in ("model", "model_type", "template", *OF_THE_SERVER)
    } | {"port": PORT}
    if (
        replicas := count_of(named, "server_gpus")
        // (count_of(named, "vllm_tensor_parallel_size") or 1)
    ) > 1:
        options["vllm_data_parallel_size"] = replicas
    last = map(str, range(ranks, task.hardware.count))
    return (
        "#!/usr/bin/env bash\n# Start this first: vLLM, on the GPUs that do not train.\n"
        f"export USE_HF=1 CUDA_VISIBLE_DEVICES={','.join(last)}\n"
        "exec"
        f" {shlex.join([str(task.workload.python), '-m', 'swift.cli.main', 'rollout', *_words(options)])}"
        ' "$@"\n'
    )


def _words(named: Mapping[str, object]) -> list[str]:
    return [
        word
        for name, value in named.items()
        if value is not None
        for word in (f"--{name}", as_word(value))
    ]


TRAINERS = (Swift("sft"), Swift("grpo"))

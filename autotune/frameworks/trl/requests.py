"""Requests to the worker, as JSON: the parts of a probe's and a trace's request, and the trace's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from autotune.core.dataset import FILE_LOADERS
from autotune.core.errors import IllegalConfiguration
from autotune.core.job import Task
from autotune.core.space import Candidate
from autotune.frameworks.stand_in_step import gptq_bits
from autotune.frameworks.transformers_trainer import ddp_options
from autotune.frameworks.trl import topology
from autotune.frameworks.trl.accelerate_files import launch_configuration
from autotune.frameworks.trl.combinations import quantisation
from autotune.frameworks.trl.field_list import fields
from autotune.frameworks.trl.settings import OWN_SETTINGS, engine_dtype, max_num_seqs
from autotune.frameworks.trl.topology import ranks_of, sharding_of, with_server

DATASET_KEYS = (
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming", "datasets",
    "streaming", "test_split_size",
)  # fmt: skip

SIDE_EFFECTS = (
    "output_dir", "push_to_hub", "report_to", "run_name", "project", "trackio_", "hub_", "log", "save_", "eval", "do_",
    "resume_from_checkpoint", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "max_steps",
    "num_train_epochs", "disable_tqdm", "prediction_loss_only", "fp16_full_eval", "bf16_full_eval", "per_device_eval",
    "num_generations_eval", "num_completions_to_print",
)  # fmt: skip
"""Prefixes of settings that a probe sets itself: outputs, duration, evaluation."""

ENGINE_SIZES = frozenset(
    {"vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode", "vllm_mode"}
)
"""Settings without effect on the trainer's step. Candidates that differ only in them share a trace."""

EVALUATION_SETTINGS = (
    "per_device_eval_batch_size", "num_generations_eval", "eval_accumulation_steps", "prediction_loss_only", "bf16_full_eval",
    "fp16_full_eval",
)  # fmt: skip


def dataset_of(task: Task) -> Mapping[str, object] | None:
    """Return the dataset settings in TRL's names; None: no dataset."""
    named = {name: task.workload.user_settings[name] for name in DATASET_KEYS if name in task.workload.user_settings}
    if task.workload.dataset is not None:
        named = {**{name: value for name, value in named.items() if name != "datasets"}, "dataset_name": task.workload.dataset}
        loader = FILE_LOADERS.get(Path(task.workload.dataset).suffix)
        if loader is not None:  # one file of rows: `load_dataset` takes a file's path for a name on the hub
            streaming = named.get("dataset_streaming") or named.get("streaming")
            return {
                "datasets": [{"path": loader, "data_files": str(Path(task.workload.dataset).expanduser().resolve())}],
                "dataset_train_split": "train",
                **({"streaming": True} if streaming else {}),
            }
    return named if named.get("dataset_name") or named.get("datasets") else None


def evaluation_request(task: Task) -> Mapping[str, object] | None:
    """Return the settings that determine an evaluation's memory; None: the run never evaluates."""
    user = {**task.workload.held, **task.workload.user_settings}
    if user.get("eval_strategy") in (None, "no", False):  # YAML reads an unquoted no as false
        return None
    return {"settings": {name: user[name] for name in EVALUATION_SETTINGS if user.get(name) is not None}}


def adapter_request(candidate: Candidate, task: Task) -> dict[str, object] | None:
    """Return the adapter; None under full tuning."""
    if not candidate.settings.get("use_peft"):
        return None
    user, settings = task.workload.user_settings, candidate.settings
    return {
        **{name: settings[name] for name in ("lora_r", "lora_alpha", "lora_dropout")},
        "lora_target_modules": user.get("lora_target_modules", settings.get("lora_target_modules")),
        **{name: user[name] for name in ("lora_target_parameters", "lora_modules_to_save") if name in user},
        **{name: settings[name] for name in ("use_rslora", "use_dora", "lora_task_type") if name in settings},
    }


def trainer_settings(settings: Mapping[str, object], method: str = "grpo") -> dict[str, object]:
    """Return the settings of the configuration class, without those with side effects."""
    known = fields(method)
    whole = {**settings, **topology.nested(settings, settings)}
    return {
        name: value
        for name, value in whole.items()
        if name in known and known[name].owner == "config" and name not in OWN_SETTINGS and not name.startswith(SIDE_EFFECTS)
    }


def model_request(candidate: Candidate, task: Task, **own: object) -> dict[str, object]:
    """Return the model and its loading; `own`: entries of one kind of request."""
    model, settings = task.workload.model, candidate.settings
    return {
        "name": model.name,
        "folder": None if model.folder is None else str(model.folder),
        "config": dict(model.config),
        **own,
        "dtype": settings["dtype"],
        "attn_implementation": settings.get("attn_implementation"),
        "load_in_4bit": bool(settings.get("load_in_4bit")),
        "load_in_8bit": bool(settings.get("load_in_8bit")),
    }


def trace_request(candidate: Candidate, task: Task, prompt: int, completion: int) -> Mapping[str, object]:
    """Return the specification of a trace: two optimizer steps, every row at its longest."""
    workload, settings = task.workload, candidate.settings
    traced = trainer_settings({**workload.user_settings, **settings}, workload.method)
    return {
        "method": workload.method,
        "model": {**model_request(candidate, task), "gptq_bits": gptq_bits(workload.model.config), "layers": None},
        "adapter": adapter_request(candidate, task),
        "settings": {name: value for name, value in traced.items() if name not in ENGINE_SIZES},
        "device": task.hardware.kind,
        "lengths": {"prompt": prompt, "completion": completion, "padded": False},
        **images_request(task),
        "sharding": sharding_request(candidate, task),
        "micro_steps": None,
        "steps": 2,
        "trust_remote_code": workload.trust_remote_code,
    }


def lengths_request(settings: Mapping[str, object], task: Task) -> dict[str, object]:
    """Return the longest lengths of a probe and, under `drawn`, those that occur, where they are known.

    On emulated GPUs the speed is predicted, at either lengths."""
    workload, prompt, longest = task.workload, settings["max_prompt_length"], settings["max_completion_length"]
    request: dict[str, object] = {"prompt": prompt, "completion": longest, "typical": None}
    typical = workload.typical_completion_length
    if typical is None or not isinstance(longest, int) or task.hardware.emulated:
        return request
    drawn = {"drawn": (workload.completion_lengths, longest), "drawn_prompts": (workload.prompt_lengths, prompt)}
    samples = {
        name: list(lengths.up_to(limit).sample)
        for name, (lengths, limit) in drawn.items()
        if lengths is not None and isinstance(limit, int)
    }
    return {**request, "typical": min(typical, longest), **samples}


def images_request(task: Task) -> dict[str, object]:
    """Return the images of each row, under their key; empty: texts only."""
    images = task.workload.images
    return {} if images is None else {"images": asdict(images)}


def sharding_request(candidate: Candidate, task: Task) -> dict[str, object]:
    """Return the sharding of the training state for a trace."""
    settings = candidate.settings
    ranks = ranks_of(settings, task.hardware.count)
    named = {"offload_optimizer": "offload_optimizer_device", "offload_param": "offload_param_device"}
    options: dict[str, object] = {name: {"device": "cpu"} for name, knob in named.items() if settings.get(knob) == "cpu"}
    kind = sharding_of(settings, ranks)
    if kind == "ddp" and task.workload.method != "ppo":  # PPO makes its accelerator without the Trainer's options
        options |= ddp_options({**task.workload.user_settings, **settings}, adapter=bool(settings.get("use_peft")))
    if kind == "fsdp2" and settings.get("fsdp_offload_params"):
        options["offload_params"] = True
    precision = next((name for name in ("bf16", "fp16") if settings.get(name)), None)
    if kind == "fsdp1" and precision is not None:
        options["mixed_precision"] = precision  # accelerate widens what trains to float32
    if kind == "fsdp1" and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        options["begins_on_meta"] = True  # transformers loads quantised weights on the first rank only
    return {"kind": kind, "ranks": ranks, **({"options": options} if options else {})}


def launch_request(candidate: Candidate, task: Task) -> dict[str, object]:
    """Return the launch of the ranks, as in the files of the final run."""
    return {
        "sharding": sharding_of(candidate.settings, ranks_of(candidate.settings, task.hardware.count)),
        "accelerate": launch_configuration(candidate, task),
        "environment": topology.environment_of(candidate.settings),
    }


def engine_request(candidate: Candidate) -> dict[str, object] | None:
    """Return vLLM's colocated engine; None: there is none."""
    settings = candidate.settings
    if not settings["use_vllm"] or with_server(settings):
        return None
    names = ("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode")
    request: dict[str, object] = {name: settings[name] for name in names}
    if "vllm_model_impl" in settings:
        request["vllm_model_impl"] = settings["vllm_model_impl"]
    return {**request, "max_num_seqs": max_num_seqs(settings)}


def server_request(candidate: Candidate, task: Task) -> dict[str, object] | None:
    """Return vLLM's server on GPUs of its own; None: there is none."""
    settings = candidate.settings
    if not with_server(settings):
        return None
    return {
        "gpus": topology.server_gpus(settings),
        "tensor_parallel_size": topology.server_parallel(settings),
        "gpu_memory_utilization": settings["vllm_gpu_memory_utilization"],
        "max_model_length": settings["vllm_max_model_length"],
        "model_impl": settings.get("vllm_model_impl"),
        "dtype": engine_dtype(task.workload.model.config),
    }


def refuse_unmeasurable(task: Task) -> None:
    """Raise for a quantised checkpoint with random weights: it can be predicted, but not measured."""
    if quantisation(task) and task.workload.weights != "real":
        raise IllegalConfiguration(
            f"{task.workload.model.name}: random weights cannot be quantised, and the checkpoint is ({quantisation(task)}).",
            way_out="Add --weights real, or use `autotune predict`.",
        )

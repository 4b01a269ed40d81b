"""What TRL's trainers are asked for, as JSON: the parts that a probe's and a trace's requests share, and the trace's."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.candidate import Candidate
from autotune.errors import IllegalConfiguration
from autotune.trainers.base import Job
from autotune.trainers.generic_step import gptq_bits
from autotune.trainers.trl_combinations import quantisation
from autotune.trainers.trl_fields import fields
from autotune.trainers.trl_launch import launch_configuration
from autotune.trainers.trl_settings import OWN_SETTINGS
from autotune.trainers.trl_topology import environment_of, nested, ranks_of, server_gpus, sharding_of, with_server

SIDE_EFFECTS = (
    "output_dir", "push_to_hub", "report_to", "run_name", "project", "trackio_", "hub_", "log", "save_", "eval", "do_",
    "resume_from_checkpoint", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "max_steps",
    "num_train_epochs", "disable_tqdm", "prediction_loss_only", "fp16_full_eval", "bf16_full_eval", "per_device_eval",
    "num_generations_eval", "num_completions_to_print",
)  # fmt: skip
"""Beginnings of the settings that a probe leaves to itself: where things are written, how long it runs, what it evaluates."""


def adapter_request(candidate: Candidate, job: Job) -> dict[str, object] | None:
    """The adapter that is trained in the model's place; None under full tuning."""
    if not candidate.settings.get("use_peft"):
        return None
    user = job.workload.user_settings
    lists = {name: user[name] for name in ("lora_target_parameters", "lora_modules_to_save") if name in user}
    flags = {name: candidate.settings[name] for name in ("use_rslora", "use_dora") if name in candidate.settings}
    return {
        "lora_r": candidate.settings["lora_r"],
        "lora_alpha": candidate.settings["lora_alpha"],
        "lora_dropout": candidate.settings["lora_dropout"],
        "lora_target_modules": user.get("lora_target_modules", candidate.settings.get("lora_target_modules")),
        **lists,
        **flags,
    }


def trainer_settings(settings: Mapping[str, object], method: str = "grpo") -> dict[str, object]:
    """The config class's part, without what would leave traces outside the probe."""
    known = fields(method)
    whole = {**settings, **nested(settings, settings)}
    return {
        name: value
        for name, value in whole.items()
        if name in known and known[name].owner == "config" and name not in OWN_SETTINGS and not name.startswith(SIDE_EFFECTS)
    }


ENGINE_SIZES = frozenset(
    {"vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode", "vllm_mode"}
)
"""How large the engine is moves nothing in the trainer's own step: candidates that differ in it share their trace."""


def trace_request(candidate: Candidate, job: Job, prompt: int, completion: int) -> Mapping[str, object]:
    """What is to be followed, as `inside/tracing` specifies it: every row at its longest, two optimizer steps."""
    workload, settings = job.workload, candidate.settings
    model = workload.model
    return {
        "method": workload.method,
        "model": {
            "name": model.name,
            "folder": None if model.folder is None else str(model.folder),
            "config": dict(model.config),
            "dtype": settings["dtype"],
            "attn_implementation": settings.get("attn_implementation"),
            "load_in_4bit": bool(settings.get("load_in_4bit")),
            "load_in_8bit": bool(settings.get("load_in_8bit")),
            "gptq_bits": gptq_bits(model.config),
            "layers": None,
        },
        "adapter": adapter_request(candidate, job),
        "settings": _without(trainer_settings({**workload.user_settings, **settings}, workload.method), ENGINE_SIZES),
        "device": job.hardware.kind,
        "lengths": {"prompt": prompt, "completion": completion, "padded": False},
        "sharding": sharding_request(candidate, job),
        "micro_steps": None,
        "steps": 2,
        "trust_remote_code": workload.trust_remote_code,
    }


def _without(settings: Mapping[str, object], names: frozenset[str]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if name not in names}


def sharding_request(candidate: Candidate, job: Job) -> dict[str, object]:
    """How the training state is spread, as a trace is asked."""
    settings = candidate.settings
    ranks = ranks_of(settings, job.hardware.count)
    named = {"offload_optimizer": "offload_optimizer_device", "offload_param": "offload_param_device"}
    options: dict[str, object] = {name: {"device": "cpu"} for name, knob in named.items() if settings.get(knob) == "cpu"}
    kind = sharding_of(settings, ranks)
    if kind == "fsdp1" and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        options["begins_on_meta"] = True  # transformers leaves quantised weights of all ranks but the first there
    return {"kind": kind, "ranks": ranks, **({"options": options} if options else {})}


def launch_request(candidate: Candidate, job: Job) -> dict[str, object]:
    """How the ranks are started, in the words of the files that the final run is started with."""
    return {
        "sharding": sharding_of(candidate.settings, ranks_of(candidate.settings, job.hardware.count)),
        "accelerate": launch_configuration(candidate, job),
        "environment": environment_of(candidate.settings),
    }


def server_request(candidate: Candidate) -> dict[str, object] | None:
    """vLLM's own server on GPUs of its own; None where there is none."""
    settings = candidate.settings
    if not with_server(settings):
        return None
    return {
        "gpus": server_gpus(settings),
        "gpu_memory_utilization": settings["vllm_gpu_memory_utilization"],
        "max_model_length": settings["vllm_max_model_length"],
        "model_impl": settings.get("vllm_model_impl"),
    }


def refuse_what_no_probe_runs(job: Job) -> None:
    """What can be predicted from a shape, and not measured without the weights."""
    if quantisation(job) and job.workload.weights != "real":
        raise IllegalConfiguration(
            f"{job.workload.model.name} is quantised already ({quantisation(job)}), and random weights cannot be.",
            way_out="Add --weights real, or ask `autotune predict`.",
        )

"""What TRL's trainers are asked for, as JSON: the parts that a probe's and a trace's requests share, and the trace's."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.candidate import Candidate
from autotune.errors import IllegalConfiguration
from autotune.trainers.base import Job
from autotune.trainers.trl_fields import fields
from autotune.trainers.trl_settings import OWN_SETTINGS, sharding_of

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
    return {
        name: value
        for name, value in settings.items()
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
            "gptq_bits": _gptq_bits(model.config),
            "layers": None,
        },
        "adapter": adapter_request(candidate, job),
        "settings": _without(trainer_settings({**workload.user_settings, **settings}, workload.method), ENGINE_SIZES),
        "device": job.hardware.kind,
        "lengths": {"prompt": prompt, "completion": completion, "padded": False},
        "sharding": {"kind": sharding_of(settings, job.hardware.count), "ranks": job.hardware.count},
        "micro_steps": None,
        "steps": 2,
        "trust_remote_code": workload.trust_remote_code,
    }


def _without(settings: Mapping[str, object], names: frozenset[str]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if name not in names}


def refuse_what_no_probe_runs(candidate: Candidate) -> None:
    """Sharding is foreseen, and not run yet."""
    named = candidate.settings.get("sharding")
    if named not in (None, "none", "ddp"):
        raise IllegalConfiguration(
            f"sharding={named} can be predicted, but probes run plain data parallel so far.",
            way_out="Ask `autotune predict`, add --mode predict, or leave sharding out.",
        )


def _gptq_bits(config: Mapping[str, object]) -> int | None:
    """Where the weights on the hub are quantised already."""
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping) or quantised.get("quant_method") != "gptq":
        return None
    bits = quantised.get("bits")
    return bits if isinstance(bits, int) else None

"""accelerate.yaml: how the recommended run's processes are started, and how the model is spread over them."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.candidate import Candidate
from autotune.trainers.base import Job
from autotune.trainers.trl_topology import DEEPSPEED, FSDP, ranks_of, sharding_of


def launch_configuration(candidate: Candidate, job: Job) -> dict[str, object]:
    """What `accelerate launch --config_file` takes, worded as TRL's own ready-made configurations are."""
    ranks = ranks_of(candidate.settings, job.hardware.count)
    kind = sharding_of(candidate.settings, ranks)
    precision = "bf16" if candidate.settings["bf16"] else "fp16" if candidate.settings["fp16"] else "no"
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(kind, ranks),
        **_spread(kind, candidate.settings),
        "num_machines": 1,
        "num_processes": ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": precision,
        "rdzv_backend": "static",
        "same_network": True,
        # With use_cpu on, accelerate starts a single process whatever num_processes says; the YAML's own use_cpu is enough.
        "use_cpu": job.hardware.kind == "cpu" and ranks == 1,
    }


def _distributed_type(kind: str, ranks: int) -> str:
    """`MULTI_GPU` is accelerate's word for one process per rank, with gloo on a CPU too."""
    if kind in DEEPSPEED:
        return "DEEPSPEED"
    if kind in FSDP:
        return "FSDP"
    return "MULTI_GPU" if ranks > 1 else "NO"


def _spread(kind: str, settings: Mapping[str, object]) -> Mapping[str, object]:
    if kind in DEEPSPEED:
        return {"deepspeed_config": _deepspeed(DEEPSPEED[kind], settings)}
    if kind in FSDP:
        return {"fsdp_config": _fsdp(FSDP[kind], settings)}
    return {}


def _deepspeed(stage: int, settings: Mapping[str, object]) -> dict[str, object]:
    whole = {"zero3_save_16bit_model": True} if stage == 3 else {}
    return {
        "deepspeed_multinode_launcher": "standard",
        "offload_optimizer_device": settings.get("offload_optimizer_device", "none"),
        "offload_param_device": settings.get("offload_param_device", "none"),
        "zero3_init_flag": stage == 3,
        **whole,
        "zero_stage": stage,
    }


def _fsdp(version: int, settings: Mapping[str, object]) -> dict[str, object]:
    first = {
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": True,
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": True,
    }
    return {
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": bool(settings.get("fsdp_offload_params", False)),
        "fsdp_reshard_after_forward": "FULL_SHARD" if version == 1 else True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        **(first if version == 1 else {}),
        "fsdp_version": version,
    }

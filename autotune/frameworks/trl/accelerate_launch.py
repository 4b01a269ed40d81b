"""accelerate.yaml: processes of the recommended run, and the sharding of its model."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate
from autotune.core.task import Task
from autotune.frameworks.trl.topology import DEEPSPEED, FSDP, ranks_of, sharding_of


def launch_configuration(candidate: Candidate, task: Task) -> dict[str, object]:
    """Return the file for `accelerate launch --config_file`, in the style of TRL's own ones."""
    ranks = ranks_of(candidate.settings, task.hardware.count)
    kind = sharding_of(candidate.settings, ranks)
    # accelerate's MULTI_GPU means one process per rank, with gloo on a CPU.
    distributed, sharding = ("MULTI_GPU" if ranks > 1 else "NO"), dict[str, object]()
    if kind in DEEPSPEED:
        distributed, sharding = "DEEPSPEED", {"deepspeed_config": _deepspeed(DEEPSPEED[kind], candidate.settings)}
    elif kind in FSDP:
        distributed, sharding = "FSDP", {"fsdp_config": _fsdp(FSDP[kind], candidate.settings)}
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": distributed,
        **sharding,
        "num_machines": 1,
        "num_processes": ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "bf16" if candidate.settings["bf16"] else "fp16" if candidate.settings["fp16"] else "no",
        "rdzv_backend": "static",
        "same_network": True,
        # use_cpu makes accelerate ignore num_processes. The YAML's own use_cpu is enough.
        "use_cpu": task.hardware.kind == "cpu" and ranks == 1,
    }


def _deepspeed(stage: int, settings: Mapping[str, object]) -> dict[str, object]:
    return {
        "deepspeed_multinode_launcher": "standard",
        "offload_optimizer_device": settings.get("offload_optimizer_device", "none"),
        "offload_param_device": settings.get("offload_param_device", "none"),
        "zero3_init_flag": stage == 3,
        **({"zero3_save_16bit_model": True} if stage == 3 else {}),
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

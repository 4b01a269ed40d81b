"""Files that launch the written run: accelerate.yaml and launch.sh.

launch.sh calls accelerate and TRL's scripts itself: the process of `trl grpo` initialises CUDA
while it reads the configuration (torch from 2.8 on), and keeps a context on the first GPU until
training ends.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from autotune.core.job import Task
from autotune.core.space import Candidate
from autotune.frameworks.base import Settings
from autotune.frameworks.trl.precision import engine_dtype
from autotune.frameworks.trl.settings import (
    ALLOCATOR_VARIABLE,
    DEEPSPEED,
    FSDP_VERSIONS,
    NEWER_ALLOCATOR_VARIABLE,
    OFFLOADS,
    environment_of,
    ranks_of,
    server_gpus,
    server_parallel,
    sharding_of,
    with_server,
)
from autotune.machine.nvml import DEVICE_ORDER

SERVER_PORT = 8000
"""TRL's default port; VLLM_SERVER_PORT overrides it."""


# 1. accelerate.yaml.


def launch_configuration(candidate: Candidate, task: Task) -> dict[str, object]:
    """Return the file for `accelerate launch --config_file`, in the style of TRL's own ones."""
    settings = candidate.settings
    ranks = ranks_of(settings, task.hardware.count)
    return {
        "compute_environment": "LOCAL_MACHINE",
        **_distribution(settings, ranks),
        "num_machines": 1,
        "num_processes": ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": _mixed_precision(settings),
        "rdzv_backend": "static",
        "same_network": True,
        # use_cpu makes accelerate ignore num_processes. The YAML's own use_cpu is enough.
        "use_cpu": task.hardware.kind == "cpu" and ranks == 1,
    }


def _distribution(settings: Settings, ranks: int) -> dict[str, object]:
    """Return the type of the distribution with its options."""
    sharding = sharding_of(settings, ranks)
    if sharding in DEEPSPEED:
        return {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": _deepspeed_options(DEEPSPEED[sharding], settings),
        }
    if sharding in FSDP_VERSIONS:
        return {
            "distributed_type": "FSDP",
            "fsdp_config": _fsdp_options(FSDP_VERSIONS[sharding], settings),
        }
    # accelerate's MULTI_GPU means one process per rank, with gloo on a CPU.
    return {"distributed_type": "MULTI_GPU" if ranks > 1 else "NO"}


def _deepspeed_options(stage: int, settings: Settings) -> dict[str, object]:
    options: dict[str, object] = {"deepspeed_multinode_launcher": "standard"}
    for name in OFFLOADS:
        options[name] = settings.get(name, "none")
    options["zero3_init_flag"] = stage == 3
    if stage == 3:
        options["zero3_save_16bit_model"] = True
    options["zero_stage"] = stage
    return options


def _fsdp_options(version: int, settings: Settings) -> dict[str, object]:
    options: dict[str, object] = {
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": bool(settings.get("fsdp_offload_params", False)),
        "fsdp_reshard_after_forward": "FULL_SHARD" if version == 1 else True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    }
    if version == 1:
        options |= {
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_forward_prefetch": True,
            "fsdp_sync_module_states": True,
            "fsdp_use_orig_params": True,
        }
    options["fsdp_version"] = version
    return options


def _mixed_precision(settings: Settings) -> str:
    if settings["bf16"]:
        return "bf16"
    return "fp16" if settings["fp16"] else "no"


# 2. launch.sh.


def launch_script(
    candidate: Candidate,
    task: Task,
    *,
    name: str,
    files: tuple[str, str],
    model: str,
    dataset: str | None,
    shim: str | None,
    program: str | None = None,
) -> str:
    """Return the script. `files` are TRL's and accelerate's; `dataset`, `shim` and `program` are
    relative to it.
    """
    config, accelerate = files
    trainer = f'"$here/{program}"' if program else f"-m trl.scripts.{task.workload.method}"
    train = (
        f'"$python" -m accelerate.commands.launch --config_file "$here/{accelerate}" \\\n '
        f' {trainer} --config "$here/{config}"'
    )
    if dataset:  # repeated relative to the script, so that the folder can be moved
        train += f' \\\n  --dataset_name "$here/{dataset}"'
    start = f'exec {train} "$@"\n'
    if with_server(candidate.settings):
        start = _start_with_server(candidate, task, train, model)
    return f"""#!/usr/bin/env bash
# Starts the recommended run. Further arguments go to TRL's script, which ignores unknown ones: \
./{name} --max_steps 100
# Run it in the folder to which your reward functions and paths are relative.
set -euo pipefail
here="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)"
{finder_of("python")}{exports(candidate, task, shim)}{start}"""


def exports(
    candidate: Candidate,
    task: Task,
    shim: str | None,
) -> str:
    """Return the lines that set the environment of a run as it was in its probe."""
    variables: dict[str, str] = {}
    stated = task.workload.user_settings.get("env")  # set before Python starts, as `trl` does
    if isinstance(stated, Mapping):
        variables = {str(name): str(value) for name, value in stated.items()}
    if task.hardware.kind == "cuda":
        variables |= DEVICE_ORDER
    variables |= environment_of(candidate.settings)
    lines = [f"export {variable}={shlex.quote(value)}\n" for variable, value in variables.items()]
    if ALLOCATOR_VARIABLE in variables:
        lines.append(f"unset {NEWER_ALLOCATOR_VARIABLE}\n")
    if shim:
        lines.append(f'export PYTHONPATH="$here/{shim}${{PYTHONPATH:+:$PYTHONPATH}}"\n')
    return "".join(lines)


def finder_of(program: str) -> str:
    """Return the lines that find a program of the training environment: an upper-case variable,
    or PATH.
    """
    variable = program.upper()
    return f"""{program}="${{{variable}:-{program}}}"
[ -n "$(command -v "${program}")" ] || {{
  echo "${program}: not found. Activate the training environment, or set {variable} to its path."\
 >&2
  exit 127
}}
"""


def _start_with_server(
    candidate: Candidate,
    task: Task,
    train: str,
    model: str,
) -> str:
    """Return the start of the server on the last GPUs and of the trainer on the first ones."""
    gpus = task.hardware.count
    ranks = ranks_of(candidate.settings, gpus)
    if task.workload.method == "async-grpo":
        serve = _vllm_serve(candidate, task, model)
        address = '--vllm_server_base_url "http://localhost:$port"'
    else:
        serve = _trl_vllm_serve(candidate, task, model)
        address = '--vllm_server_port "$port"'
    return f"""gpus="${{CUDA_VISIBLE_DEVICES:-{",".join(map(str, range(gpus)))}}}"
port="${{VLLM_SERVER_PORT:-{SERVER_PORT}}}"
CUDA_VISIBLE_DEVICES="$(cut -d, -f{ranks + 1}-{gpus} <<<"$gpus")" {serve} --port "$port" &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
# The trainer waits for the server by itself.
CUDA_VISIBLE_DEVICES="$(cut -d, -f1-{ranks} <<<"$gpus")" {train} {address} "$@"
"""


def _vllm_serve(
    candidate: Candidate,
    task: Task,
    model: str,
) -> str:
    """Return the command of vLLM's own server, to which the trainer sends weights over NCCL."""
    options = _server_options(candidate, task) | {
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": '{"backend":"nccl"}',
    }
    command = f'VLLM_SERVER_DEV_MODE=1 "${{VLLM:-vllm}}" serve {shlex.quote(model)}'
    for name, value in options.items():
        command += f" --{name.replace('_', '-')} {shlex.quote(str(value))}"
    if task.workload.trust_remote_code:
        command += " --trust-remote-code"
    return command


def _trl_vllm_serve(
    candidate: Candidate,
    task: Task,
    model: str,
) -> str:
    """Return the command of TRL's server."""
    options = {"model": model, **_server_options(candidate, task)}
    if candidate.settings.get("vllm_model_impl"):
        options["vllm_model_impl"] = candidate.settings["vllm_model_impl"]
    if task.workload.trust_remote_code:
        options["trust_remote_code"] = True
    command = '"$python" -m trl.scripts.vllm_serve'
    for name, value in options.items():
        command += f" --{name} {shlex.quote(str(value))}"
    return command


def _server_options(candidate: Candidate, task: Task) -> dict[str, object]:
    settings = candidate.settings
    parallel = server_parallel(settings)
    options: dict[str, object] = {"tensor_parallel_size": parallel}
    replicas = server_gpus(settings) // parallel
    if replicas > 1:
        options["data_parallel_size"] = replicas
    options["gpu_memory_utilization"] = settings["vllm_gpu_memory_utilization"]
    options["max_model_len"] = settings["vllm_max_model_length"]
    options["dtype"] = engine_dtype(task.workload.model.config)
    return options

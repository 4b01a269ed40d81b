"""A rank's environment: the variables that `accelerate launch --config_file accelerate.yaml` sets.

accelerate's own launcher reads the file written for the final run and returns its variables.
Nothing is translated, so the measured launch is the recommended one. Only the rendezvous comes from
the worker.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..protocol import Request
from ..rank import free_port

# Variables of the launcher that the worker has set already.
SET_BY_WORKER = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "PYTHONPATH",
        "CUDA_VISIBLE_DEVICES",
    }
)
# Rendezvous of a launch of one rank.
SINGLE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
# Both names of the allocator's settings.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Each rank holds the whole model, so candidates can share its tensors.
UNSHARDED = frozenset({"none", "ddp"})


def is_sharded(request: Request) -> bool:
    """Return True if the framework has to build the model for each trainer, in shards."""
    return sharding_of(request) not in UNSHARDED


def sharding_of(request: Request) -> str:
    launch = request.get("launch") or {}
    return str(launch.get("sharding", "none"))


def enter_launch(request: Request, scratch: Path) -> None:
    """Set the variables once per rank, before anything uses a device or the state of the ranks."""
    launch = request.get("launch") or {}
    if launch:  # the candidate alone decides, not what the user's shell exports
        for name in ALLOCATOR_VARIABLES:
            os.environ.pop(name, None)
    variables = launch.get("environment") or {}
    for name, value in variables.items():
        os.environ[name] = str(value)
    if is_sharded(request):
        if "RANK" not in os.environ:  # a launch of one rank: offloading is useful on one GPU, too
            os.environ.update(SINGLE_RANK)
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            os.environ["MASTER_PORT"] = str(free_port())
        environment = environment_of(launch["accelerate"], scratch)
        os.environ.update(environment)


def environment_of(configuration: Mapping[str, Any], scratch: Path) -> dict[str, str]:
    """Return the variables that accelerate's launcher changes for this configuration."""
    arguments = _launcher_arguments(configuration, scratch)
    variables = {}
    for name, value in _launcher_environment(arguments).items():
        if os.environ.get(name) != value and name not in SET_BY_WORKER:
            variables[name] = value
    return variables


def _launcher_arguments(configuration: Mapping[str, Any], scratch: Path) -> Any:
    """Return the launcher's arguments, as it completes them from the configuration file."""
    from accelerate.commands import launch

    file = scratch / "accelerate.json"
    file.write_text(json.dumps(configuration))
    port = os.environ.get("MASTER_PORT", "0")
    arguments = launch.launch_command_parser().parse_args(
        ["--config_file", str(file), "--main_process_port", port, "none.py"]
    )
    arguments, defaults, precision_from_file = launch._validate_launch_command(arguments)
    # DeepSpeed settings that the file determines, which the trainer then leaves alone; joined as in
    # the launcher.
    determined = list(defaults.deepspeed_config)
    if precision_from_file:
        determined.append("mixed_precision")
    arguments.deepspeed_fields_from_accelerate_config = ",".join(determined)
    return arguments


def _launcher_environment(arguments: Any) -> dict[str, str]:
    """Return the environment in which the launcher would start a rank."""
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    before = dict(os.environ)
    try:  # the launcher's functions may change this process's environment
        if arguments.use_deepspeed:
            _, environment = prepare_deepspeed_cmd_env(arguments)
        else:
            environment = prepare_multi_gpu_env(arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return dict(environment)

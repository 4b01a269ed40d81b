"""Environment of a rank as `accelerate launch --config_file accelerate.yaml` sets it.

accelerate's own launcher reads the file written for the final run and returns its variables. Nothing is translated here, so
the measured launch is the recommended one. Only the rendezvous comes from the worker.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..rank import free_port

# Variables of the launcher that the worker has set already.
SET_BY_WORKER = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONPATH",
    "CUDA_VISIBLE_DEVICES",
})  # fmt: skip
# Both names of the allocator's settings.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Each rank holds the whole model, so candidates can share its tensors.
UNSHARDED = frozenset({"none", "ddp"})


def enter(request: Mapping[str, Any], scratch: Path) -> None:
    """Set the variables once per rank, before anything uses a device or the state of the ranks."""
    launch = request.get("launch") or {}
    if launch:  # the candidate alone decides, not what the user's shell exports
        for name in ALLOCATOR:
            os.environ.pop(name, None)
    os.environ.update({name: str(value) for name, value in (launch.get("environment") or {}).items()})
    if is_sharded(request):
        if "RANK" not in os.environ:  # a launch of one rank: offloading is useful on one GPU, too
            alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        os.environ.update(environment_of(launch["accelerate"], scratch))


def is_sharded(request: Mapping[str, Any]) -> bool:
    """Return True if the framework has to build the model for each trainer, in shards."""
    return (request.get("launch") or {}).get("sharding", "none") not in UNSHARDED


def environment_of(configuration: Mapping[str, Any], scratch: Path) -> dict[str, str]:
    """Return the variables that accelerate's launcher changes for this configuration."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    file = scratch / "accelerate.json"
    file.write_text(json.dumps(configuration))
    port = os.environ.get("MASTER_PORT", "0")
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(file), "--main_process_port", port, "none.py"])
    arguments, found, precision_from_file = launch._validate_launch_command(arguments)
    # DeepSpeed settings that the file determines, which the trainer then leaves alone; joined as in the launcher.
    determined = [*found.deepspeed_config, *(["mixed_precision"] if precision_from_file else [])]
    arguments.deepspeed_fields_from_accelerate_config = ",".join(determined)
    before = dict(os.environ)
    try:  # the launcher's functions may change this process's environment
        made = prepare_deepspeed_cmd_env(arguments)[1] if arguments.use_deepspeed else prepare_multi_gpu_env(arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {name: value for name, value in made.items() if os.environ.get(name) != value and name not in SET_BY_WORKER}

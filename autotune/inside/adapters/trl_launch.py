"""A rank's environment as `accelerate launch --config_file accelerate.yaml` would make it.

accelerate's own launcher reads the very file that is written for the final run, and says what it would set; nothing is
translated here, so what is measured is what is recommended. Only where the ranks meet is ours: the keeper has settled that.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RENDEZVOUS = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONPATH",
    "CUDA_VISIBLE_DEVICES",
})  # fmt: skip
"""What the launcher would say too, and the keeper has said already."""

WHOLE = frozenset({"none", "ddp"})
"""Every rank holds the whole model, so candidates can share its tensors."""


def enter(request: Mapping[str, Any], scratch: Path) -> None:
    """Once per rank, before anything touches a device or asks for the state of the ranks."""
    launch = request.get("launch") or {}
    os.environ.update({name: str(value) for name, value in (launch.get("environment") or {}).items()})
    if spreads(request):
        if "RANK" not in os.environ:  # one rank that is launched all the same: offloading is worth it on one GPU, too
            alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
        os.environ.update(environment_of(launch["accelerate"], scratch))


def spreads(request: Mapping[str, Any]) -> bool:
    """Whether the model is spread over the ranks: then the framework must build it anew for every trainer, in parts."""
    return (request.get("launch") or {}).get("sharding", "none") not in WHOLE


def stays_behind(request: Mapping[str, Any]) -> bool:
    """DeepSpeed does not let go of all that ZeRO-3 took apart: about one model's share stays with every trainer."""
    return (request.get("launch") or {}).get("sharding") == "zero3"


def environment_of(configuration: Mapping[str, Any], scratch: Path) -> dict[str, str]:
    """What accelerate's launcher sets for this configuration, and nothing that was set before."""
    from accelerate.commands import launch

    file = scratch / "accelerate.json"
    file.write_text(json.dumps(configuration))
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(file), "--main_process_port", _port(), "none.py"])
    arguments, found, precision_from_file = launch._validate_launch_command(arguments)
    # Which of DeepSpeed's settings the file decides, so that the trainer leaves those alone: the launcher joins them so, too.
    decided = [*found.deepspeed_config, *(["mixed_precision"] if precision_from_file else [])]
    arguments.deepspeed_fields_from_accelerate_config = ",".join(decided)
    with _before(os.environ):
        made = _launcher(launch, arguments)
    return {name: value for name, value in made.items() if os.environ.get(name) != value and name not in RENDEZVOUS}


def _launcher(launch: Any, arguments: Any) -> dict[str, str]:
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    made: dict[str, str]
    if arguments.use_deepspeed:
        _, made = prepare_deepspeed_cmd_env(arguments)
    else:
        made = prepare_multi_gpu_env(arguments)
    return made


def _port() -> str:
    return os.environ.get("MASTER_PORT", "0")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def _before(environment: Any) -> Iterator[None]:
    """The launcher's functions may change this process's environment on the way; they only tell here."""
    kept = dict(environment)
    try:
        yield
    finally:
        environment.clear()
        environment.update(kept)

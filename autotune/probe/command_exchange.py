"""A command to the ranks, and their messages until every rank has replied or failed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from autotune.core.errors import TrainingEnvironmentError
from autotune.core.measurement import PHASES, Phase
from autotune.probe.worker_process import WorkerLost, WorkerProcess, install_hint
from autotune.worker import protocol
from autotune.worker.protocol import Message

ROOT_CAUSE_SECONDS = 0.2  # Wait for other ranks after a failure: a peer may report before the lost rank is noticed
VICTIM_SECONDS = 3.0  # Wait for `lost` after a kill by the kernel: it comes once the rank's memory is reclaimed
KERNEL_SHARE = 100  # 1/KERNEL_SHARE of the limit is for page tables and sockets, which only a cgroup counts


@dataclass(kw_only=True)
class CommandReply:
    """Messages of the ranks in reply to one command."""

    results: dict[int, Message] = field(default_factory=dict)  # `loaded` or `measured`, by rank
    failures: list[Message] = field(default_factory=list)  # `failed` and `lost`, in order of arrival
    phases: dict[int, Phase] = field(default_factory=dict)  # Last reported phase, by rank
    timed_out: bool = False
    moved_at: float = field(default_factory=time.monotonic)  # Time of the last sign of progress; of the command itself at first
    moving: str = "the command was sent"  # Description of that sign
    quiet_seconds: float = 0.0  # Time without progress when the deadline passed
    worker_lost: bool = False
    printed: str = ""  # Output of the processes meanwhile; set only after a failure
    usage_before_bytes: int = 0  # Memory of the tree when the command was sent

    @property
    def ended_well(self) -> bool:
        return not (self.failures or self.timed_out or self.worker_lost)

    @property
    def gone_before(self) -> bool:
        """True if a rank had exited before the command reached it, with unknown status."""
        return any(m.get("event") == protocol.LOST and m.get("signal") is None and m.get("exit") is None for m in self.failures)

    def phase_of(self, rank: int | None) -> Phase | None:
        """Return the rank's last phase; any rank's if that one reported none."""
        if rank in self.phases:
            return self.phases[rank]
        return next(iter(self.phases.values()), None)


class CommandExchange:
    """Sends commands to the ranks of one worker."""

    def __init__(self, worker: WorkerProcess, ranks: int) -> None:
        self._worker, self._ranks, self._kills_before = worker, ranks, 0

    def load(self, request: Mapping[str, object], deadline: float) -> CommandReply:
        if not self._worker.warm:
            # First, so that the memory of the imports is known when the rest is divided among ranks.
            imported = self._send(
                {"do": protocol.WARM, "load": dict(request)}, protocol.READY, deadline, first_phase="load", replies=1
            )
            if not imported.ended_well:
                return imported
        span = {} if self._worker.span is None else {"span": asdict(self._worker.span)}
        command: Message = {"do": protocol.LOAD, "ranks": self._ranks, "load": dict(request), **span}
        return self._send(command, protocol.LOADED, deadline, first_phase="load")

    def measure(self, request: Mapping[str, object], deadline: float) -> CommandReply:
        return self._send({"do": protocol.MEASURE, "request": dict(request)}, protocol.MEASURED, deadline, first_phase=None)

    def _send(
        self, message: Message, expected: str, deadline: float, *, first_phase: Phase | None, replies: int | None = None
    ) -> CommandReply:
        mark = self._worker.mark_output()
        self._worker.enter(first_phase)
        reply = CommandReply(usage_before_bytes=self._worker.meter.now())
        if first_phase is not None:
            reply.phases = dict.fromkeys(range(self._ranks), first_phase)
        try:
            self._kills_before = self._worker.limit.oom_kills()
            number = self._worker.send({**message, **self._bounds(reply.usage_before_bytes)})
            self._receive(reply, number, expected, deadline, replies or self._ranks)
        except WorkerLost:
            reply.worker_lost = True
        if not reply.ended_well:
            reply.printed = self._worker.printed_since(mark)
        return reply

    def _bounds(self, usage_bytes: int) -> Message:
        limit = self._worker.effective_limit_bytes
        if self._worker.on_gpus:
            devices = self._worker.gpus.for_ranks() if self._worker.gpus is not None else []
            return {"guard_bytes": None, "slack_bytes": 0, "device_limit_bytes": limit, "devices": devices}
        # guard per rank = (limit - limit / KERNEL_SHARE - memory in use) / ranks
        free = limit - limit // KERNEL_SHARE - usage_bytes
        # RLIMIT_DATA counts mapped memory, touched or not. Under a cgroup, which counts
        # touched pages, the slack lets the guard refuse only what could never fit.
        slack = limit if self._worker.limit.kernel_kills else 0
        return {"guard_bytes": max(0, free) // self._ranks, "slack_bytes": slack, "device_limit_bytes": None}

    def _receive(self, reply: CommandReply, number: int, expected: str, deadline: float, replies: int) -> None:
        first_failure: float | None = None
        while len(reply.results) + len(reply.failures) < replies:
            until = deadline
            if first_failure is not None:
                killed = self._worker.limit.oom_kills() > self._kills_before
                victim_missing = killed and not any(failure.get("event") == protocol.LOST for failure in reply.failures)
                until = min(deadline, first_failure + (VICTIM_SECONDS if victim_missing else ROOT_CAUSE_SECONDS))
            if time.monotonic() >= until:
                reply.timed_out = not reply.failures
                reply.quiet_seconds = time.monotonic() - reply.moved_at
                return
            for message in self._worker.receive(until):
                if message.get("id") in (number, None):
                    self._record(reply, message, expected)
            if reply.failures and first_failure is None:
                first_failure = time.monotonic()

    def _record(self, reply: CommandReply, message: Message, expected: str) -> None:
        event, rank = message.get("event"), message.get("rank", 0)
        progress = {
            protocol.PROGRESS: str(message.get("words")),
            protocol.PHASE: f"phase {message.get('phase')} began",
            protocol.CYCLE: f"cycle {message.get('done')} ended",
        }.get(str(event))
        if progress is not None:
            reply.moved_at, reply.moving = time.monotonic(), progress
        if event == protocol.READY:
            self._worker.warm, self._worker.afresh = True, message.get("afresh")
            self._worker.versions.update(message.get("versions") or {})
        if event == protocol.PHASE and message.get("phase") in PHASES:
            reply.phases[rank] = message["phase"]
            self._worker.enter(message["phase"])
        elif event == expected:
            reply.results[rank] = message
        elif event == protocol.FAILED:
            reply.failures.append(message)
        elif event == protocol.LOST:
            reported = any(failure.get("rank") == rank for failure in reply.failures)
            announced = reply.results.get(rank, {}).get("stays") is False and message.get("exit") == 0
            if not reported and not announced:
                reply.results.pop(rank, None)
                reply.failures.append(message)
        elif event == protocol.UNREADY:
            settings, error = self._worker.settings, message["error"]
            hints = [install_hint(settings.python, package, versions) for package, versions in settings.supported.items()]
            text = f"{error.get('type')}: {str(error.get('text')).strip()}"[-500:]
            raise TrainingEnvironmentError(
                " ".join([f"The training environment behind {settings.python} cannot be imported ({text}).", *hints])
            )

"""Exchange with the ranks of a worker: a command, and messages until each replied or failed."""

from __future__ import annotations

import time

from autotune.core.errors import TrainingEnvironmentError
from autotune.core.measurement import PHASES, Phase
from autotune.probe.command_reply import CommandReply
from autotune.probe.spawn import import_hints
from autotune.probe.worker_process import WorkerLost, WorkerProcess
from autotune.worker import protocol
from autotune.worker.protocol import Message

# Wait for other ranks after a failure: a peer may report before the lost rank is noticed.
ROOT_CAUSE_SECONDS = 0.2

# Wait for `lost` after a kill by the kernel: it comes once the rank's memory is reclaimed.
VICTIM_SECONDS = 3.0

# 1/KERNEL_SHARE of the limit is for page tables and sockets, which only a cgroup counts.
KERNEL_SHARE = 100


class CommandExchange:
    """Commands to the ranks of one probe, until its deadline."""

    def __init__(
        self,
        worker: WorkerProcess,
        ranks: int,
        deadline: float,
    ) -> None:
        self._worker = worker
        self._ranks = ranks
        self._deadline = deadline

    def send(
        self,
        message: Message,
        expected: str,
        *,
        first_phase: Phase | None = None,
        replies: int | None = None,
    ) -> CommandReply:
        """Send a command to the ranks and return their replies, as many as there are ranks."""
        mark = self._worker.mark_output()
        self._worker.enter(first_phase)
        reply = CommandReply(usage_before_bytes=self._worker.meter.now())
        if first_phase is not None:
            reply.phases = dict.fromkeys(range(self._ranks), first_phase)
        try:
            kills_before = self._worker.limit.oom_kills()
            number = self._worker.send({**message, **self._bounds(reply.usage_before_bytes)})
            self._receive(reply, number, expected, replies or self._ranks, kills_before)
        except WorkerLost:
            reply.worker_lost = True
        if not reply.ended_well:
            reply.printed = self._worker.printed_since(mark)
        return reply

    def _bounds(self, usage_bytes: int) -> Message:
        limit = self._worker.effective_limit_bytes
        if self._worker.on_gpus:
            gpus = self._worker.gpus
            return {
                "guard_bytes": None,
                "slack_bytes": 0,
                "device_limit_bytes": limit,
                "devices": [] if gpus is None else gpus.for_ranks(),
            }
        # guard per rank = (limit - limit / KERNEL_SHARE - memory in use) / ranks
        free = limit - limit // KERNEL_SHARE - usage_bytes
        # RLIMIT_DATA counts mapped memory, touched or not. Under a cgroup, which counts
        # touched pages, the slack lets the guard refuse only what could never fit.
        slack = limit if self._worker.limit.kernel_kills else 0
        return {
            "guard_bytes": max(0, free) // self._ranks,
            "slack_bytes": slack,
            "device_limit_bytes": None,
        }

    def _receive(
        self,
        reply: CommandReply,
        number: int,
        expected: str,
        replies: int,
        kills_before: int,
    ) -> None:
        first_failure: float | None = None
        while len(reply.results) + len(reply.failures) < replies:
            until = self._deadline
            if first_failure is not None:
                until = min(until, first_failure + self._patience(reply, kills_before))
            if time.monotonic() >= until:
                reply.timed_out = not reply.failures
                reply.quiet_seconds = time.monotonic() - reply.moved_at
                return
            for message in self._worker.receive(until):
                if message.get("id") in (number, None):
                    self._record(reply, message, expected)
            if reply.failures and first_failure is None:
                first_failure = time.monotonic()

    def _patience(self, reply: CommandReply, kills_before: int) -> float:
        """Return how long to wait for other ranks after the first failure."""
        if self._worker.limit.oom_kills() <= kills_before:
            return ROOT_CAUSE_SECONDS
        for failure in reply.failures:
            if failure.get("event") == protocol.LOST:
                return ROOT_CAUSE_SECONDS
        return VICTIM_SECONDS  # the killed rank is not reported yet

    def _record(
        self,
        reply: CommandReply,
        message: Message,
        expected: str,
    ) -> None:
        event = message.get("event")
        rank = message.get("rank", 0)
        sign = _sign_of_progress(message)
        if sign is not None:
            reply.moved_at = time.monotonic()
            reply.moving = sign
        if event == protocol.READY:
            self._worker.warm = True
            self._worker.afresh = message.get("afresh")
            self._worker.versions.update(message.get("versions") or {})
        if event == protocol.PHASE and message.get("phase") in PHASES:
            reply.phases[rank] = message["phase"]
            self._worker.enter(message["phase"])
        elif event == expected:
            reply.results[rank] = message
        elif event == protocol.FAILED:
            reply.failures.append(message)
        elif event == protocol.LOST:
            _record_loss(reply, message, rank)
        elif event == protocol.UNREADY:
            raise self._cannot_import(message["error"])

    def _cannot_import(self, error: Message) -> TrainingEnvironmentError:
        settings = self._worker.settings
        reason = f"{error.get('type')}: {str(error.get('text')).strip()}"[-500:]
        sentences = [
            f"The training environment behind {settings.python} cannot be imported ({reason})."
        ]
        sentences += import_hints(settings.python, error, settings.supported)
        return TrainingEnvironmentError(" ".join(sentences))


def _sign_of_progress(message: Message) -> str | None:
    """Return the description of a message that shows progress, None for others."""
    match message.get("event"):
        case protocol.PROGRESS:
            return str(message.get("words"))
        case protocol.PHASE:
            return f"phase {message.get('phase')} began"
        case protocol.CYCLE:
            return f"cycle {message.get('done')} ended"
    return None


def _record_loss(
    reply: CommandReply,
    message: Message,
    rank: int,
) -> None:
    """Record the end of a rank, unless it reported its failure or announced its exit."""
    if any(failure.get("rank") == rank for failure in reply.failures):
        return
    announced = reply.results.get(rank, {}).get("stays") is False
    if announced and message.get("exit") == 0:
        return
    reply.results.pop(rank, None)
    reply.failures.append(message)

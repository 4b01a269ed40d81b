"""Wire between the parent and the processes of a probe: JSON lines over a socket.

Both sides import this module. A message starts and ends with a line feed, so a half-written line of
a killed process cannot swallow it. A line that is no JSON object is counted and skipped.

The parent sends a `Command`; the worker and its ranks reply with `Event`s. Fields are absent, or
null, where they do not apply. An unknown figure is null, never 0.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from typing import Any, TypedDict

Message = dict[str, Any]  # `Command` or `Event`, not yet validated
# Commands: parent to worker.
WARM = "warm"  # import everything that this load needs; answered by READY or UNREADY
LOAD = "load"  # end the ranks, fork new ones and load in each
MEASURE = "measure"  # measure one candidate in each rank
UNLOAD = "unload"  # end the ranks, keep the worker
QUIT = "quit"

# Events: worker to parent.
ENVIRONMENT = "environment"  # installed versions, before any heavy import
READY = "ready"  # imports are done
UNREADY = "unready"  # imports failed: `error`
LOST = "lost"  # a rank exited without reporting: `signal` or `exit`
UNLOADED = "unloaded"
STUCK = "stuck"  # `pids` cannot be ended, because a device driver holds them

# Events: rank to parent; the worker adds `rank`.
LOADING = "loading"
LOADED = "loaded"  # `bytes`: held after the load; `result`: `Memory` during it
PHASE = "phase"  # at each change of phase
CYCLE = "cycle"  # `done` cycles of `of`, the last with its `seconds` and `tokens`
PROGRESS = "moves"  # `words`: latest progress, which separates slow from hung at a deadline
MEASURED = "measured"
FAILED = "failed"

PHASES = ("load", "rollout", "sync", "reward", "score", "forward", "backward", "optimizer")
OTHER = "other"  # time that belongs to none of PHASES


class Span(TypedDict):
    """Position of this machine's ranks among all ranks of a job."""

    first: int
    world: int
    address: str
    port: int | None


class Command(TypedDict, total=False):
    """Message from parent to worker."""

    do: str
    id: int
    load: Message  # request of WARM and LOAD, defined by the adapter
    ranks: int  # number of ranks on this machine
    span: Span | None
    request: Message  # request of MEASURE, defined by the adapter
    guard_bytes: int | None  # growth that remains for each rank up to the machine's memory limit
    # Memory that a rank may map beyond that without touching it, where a cgroup counts touched
    # pages.
    slack_bytes: int
    device_limit_bytes: int | None  # limit of each rank on its own GPU
    devices: list[Message]  # one entry per local rank: others_bytes, cap_bytes, engine_share_scale


class ErrorText(TypedDict, total=False):
    """Exception of the worker or of a rank."""

    type: str
    text: str
    traceback: str
    chain: list[Message]  # `type` and `text` of the error, its cause, the cause of that,
    frames: list[str]  # innermost frames as file:function, outermost first


class Memory(TypedDict, total=False):
    """Memory of one rank. CPU: RssAnon + RssShmem. GPU: the rank's share of its device."""

    peak_bytes: int | None
    phase_peak_bytes: dict[str, int]
    # allocated_bytes, reserved_bytes (both peaks), retries and out_of_memory (both counts) by
    # phase.
    torch_by_phase: dict[str, Message]
    torch_allocated_bytes: int | None
    torch_reserved_bytes: int | None
    torch_reserved_why: str | None  # reason for an unknown reserved figure
    allocation_retries: int | None
    allocation_failures: int | None
    device_uuid: str | None


class Speed(TypedDict):
    """Timed cycles of one run on one rank."""

    completion_tokens: int  # length of each completion; of drawn lengths the mean
    drawn: bool  # true: each completion had a length of its own
    cycle_seconds: list[float]
    cycle_loss_tokens: list[int]
    prompt_tokens: int
    # Exclusive seconds by phase, OTHER among them; their sum is that of `cycle_seconds`.
    phase_seconds: dict[str, float]
    user_reward_seconds: float
    cut_short: bool
    # Part of `cycle_seconds` that was measured for an earlier candidate with the same rollouts.
    borrowed_seconds: float


class Result(TypedDict, total=False):
    """Result of one measure on one rank; `partial` of FAILED has the fields known by then."""

    worst: Speed | None  # run at the longest lengths
    typical: Speed | None  # run at typical lengths
    optimizer_steps: int
    effective: Message  # settings read back from the trainer, the model and the engine
    memory: Memory
    setup_seconds: float
    loop_seconds: float
    model_bytes: dict[str, int]  # bytes of the models' own tensors by part, see `model_memory.py`
    # The same for all ranks of a launched run: [{"rank": r, "bytes": {...}}, ...].
    models: list[Message]
    exercised: Message  # counts of the real run: `autotune.core.measurement.LoopActivity`
    # Number of ranks according to the trainer; it has to equal that of the probe.
    world_size: int | None


class Event(TypedDict, total=False):
    """Message from worker or rank to parent."""

    event: str
    id: int
    rank: int
    pid: int
    pids: list[int]
    seconds: float
    versions: dict[str, str]
    # READY: reason to start each rank as an interpreter of its own, because imports initialised
    # CUDA.
    afresh: str | None
    world_size: int
    bytes: int
    phase: str | None
    done: int
    of: int | None
    tokens: int
    words: str
    base_bytes: int  # memory of the rank before the request
    # False: the rank exits and the parent loads it again. True: it takes the next candidate.
    stays: bool
    result: Result
    partial: Result
    error: ErrorText
    signal: int | None
    exit: int | None
    ended: Message  # `signal` and `exit` of a program that the adapter started


MAX_LINE_BYTES = 128 * 2**20  # larger than any trace of a step, which is the longest message
_RECEIVE_BYTES = 2**18


class Wire:
    """End of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        self._sending = threading.Lock()
        self.closed = False  # true once the other end is gone
        self.broken_lines = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """Send a message. Return False, and set `closed`, if the other end is gone."""
        line = b"\n" + json.dumps(message, default=str).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError:
            self.closed = True
        return not self.closed

    def take(self, timeout_seconds: float | None = None) -> list[Message]:
        """Return the received messages; wait at most `timeout_seconds` (None: no limit)."""
        if self.closed or not self._readable(timeout_seconds):
            return []
        try:
            received = self._socket.recv(_RECEIVE_BYTES)
        except OSError:
            received = b""
        self.closed = self.closed or not received
        self._buffer += received
        # A long line arrives in many pieces, and only the last of them ends it.
        return self._complete_lines() if b"\n" in received or len(self._buffer) > MAX_LINE_BYTES else []

    def take_rest(self) -> list[Message]:
        """Return everything that arrived before the other end closed, without waiting."""
        messages = self.take(0)
        while not self.closed and self._readable(0):
            messages += self.take(0)
        return messages

    def hang_up(self) -> None:
        """End all waiting on either end, from any thread. The socket itself stays until `close`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.closed = True
        self._socket.close()

    def _readable(self, timeout_seconds: float | None) -> bool:
        # poll, not select: a rank may have more than 1024 files open.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if timeout_seconds is None else max(0.0, timeout_seconds) * 1000))

    def _complete_lines(self) -> list[Message]:
        *lines, self._buffer = self._buffer.split(b"\n")
        if len(self._buffer) > MAX_LINE_BYTES:
            self._buffer = b""
            self.broken_lines += 1
        messages = []
        for line in filter(None, lines):
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):  # RecursionError: brackets nested a thousand deep
                message = None
            if isinstance(message, dict):
                messages.append(message)
            else:
                self.broken_lines += 1
        return messages

"""One command to the ranks, and everything that was said in answer until it is settled."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from autotune.errors import TrainingEnvironmentError
from autotune.inside.wire import Message
from autotune.measurement import PHASES, Phase
from autotune.rig.keeper import Keeper, KeeperLost, install_line

ROOT_CAUSE_SECONDS = 0.2
"""How long the other ranks are heard after the first failure: a peer may complain before the rank that was killed is missed."""

VICTIM_SECONDS = 3.0
"""How long the rank is waited for that the kernel has ended, when its peers were heard first: its memory is taken back before
its end is told."""

KERNEL_SHARE = 100
"""One part in so many of the limit is left for page tables and sockets, which a cgroup counts and a rank does not."""


@dataclass(kw_only=True)
class Answer:
    """What the ranks said to one command."""

    results: dict[int, Message] = field(default_factory=dict)
    """By rank: its `loaded` or `measured`."""

    failures: list[Message] = field(default_factory=list)
    """`failed` and `lost`, in the order in which they were heard."""

    phases: dict[int, Phase] = field(default_factory=dict)
    """By rank: the last phase it was heard to enter."""

    timed_out: bool = False
    moved_at: float = field(default_factory=time.monotonic)
    """When a rank was last heard to go on; at first when it was asked."""

    moving: str = "it was asked to begin"
    """In what it was heard to."""

    quiet_seconds: float = 0.0
    """For how long it was not, when its deadline came."""

    keeper_lost: bool = False
    printed: str = ""
    """What the rig's processes printed meanwhile; filled where something went wrong."""

    usage_before_bytes: int = 0
    """The tree's memory when the command was given."""

    @property
    def ended_well(self) -> bool:
        return not (self.failures or self.timed_out or self.keeper_lost)

    @property
    def gone_before(self) -> bool:
        """Whether a rank had ended before the command reached it, so that nobody saw how."""
        unseen = [m for m in self.failures if m.get("event") == "lost" and m.get("signal") is None and m.get("exit") is None]
        return bool(unseen)

    def phase_of(self, rank: int | None) -> Phase | None:
        """The rank's last phase; any rank's where nothing was heard of that one."""
        if rank in self.phases:
            return self.phases[rank]
        return next(iter(self.phases.values()), None)


class Conversation:
    """Speaks to one keeper's ranks."""

    def __init__(self, keeper: Keeper, ranks: int) -> None:
        self._keeper = keeper
        self._ranks = ranks
        self._kills_before = 0

    def load(self, request: Mapping[str, object], deadline: float) -> Answer:
        if not self._keeper.warm:
            # Apart from the load: what the imports take must be there when the rest of the limit is shared out.
            imported = self._ask({"do": "warm", "load": dict(request)}, "ready", deadline, first_phase="load", answers=1)
            if not imported.ended_well:
                return imported
        span = {} if self._keeper.span is None else {"span": asdict(self._keeper.span)}
        command: Message = {"do": "load", "ranks": self._ranks, "load": dict(request), **span}
        return self._ask(command, "loaded", deadline, first_phase="load")

    def measure(self, request: Mapping[str, object], deadline: float) -> Answer:
        return self._ask({"do": "measure", "request": dict(request)}, "measured", deadline, first_phase=None)

    def _ask(
        self, message: Message, expected: str, deadline: float, *, first_phase: Phase | None, answers: int | None = None
    ) -> Answer:
        mark = self._keeper.mark_output()
        self._keeper.enter(first_phase)
        answer = Answer(usage_before_bytes=self._keeper.meter.now())
        if first_phase is not None:
            answer.phases = dict.fromkeys(range(self._ranks), first_phase)
        try:
            self._kills_before = self._keeper.limit.oom_kills()
            number = self._keeper.say({**message, **self._bounds(answer.usage_before_bytes)})
            self._listen(answer, number, expected, deadline, answers or self._ranks)
        except KeeperLost:
            answer.keeper_lost = True
        if not answer.ended_well:
            answer.printed = self._keeper.printed_since(mark)
        return answer

    def _bounds(self, usage_bytes: int) -> Message:
        limit = self._keeper.effective_limit_bytes
        if self._keeper.device_kind == "cuda":
            devices = self._keeper.gpus.for_ranks() if self._keeper.gpus is not None else []
            return {"guard_bytes": None, "slack_bytes": 0, "device_limit_bytes": limit, "devices": devices}
        free = limit - limit // KERNEL_SHARE - usage_bytes
        # Memory that is mapped and never touched is none yet. Where the kernel counts what is touched, the guard only refuses
        # at once what could never fit; where nothing else binds the tree, it is all there is.
        slack = limit if self._keeper.limit.kernel_kills else 0
        return {"guard_bytes": max(0, free) // self._ranks, "slack_bytes": slack, "device_limit_bytes": None}

    def _listen(self, answer: Answer, number: int, expected: str, deadline: float, answers: int) -> None:
        first_failure: float | None = None
        while len(answer.results) + len(answer.failures) < answers:
            until = deadline if first_failure is None else min(deadline, first_failure + self._patience(answer))
            if time.monotonic() >= until:
                answer.timed_out = not answer.failures
                answer.quiet_seconds = time.monotonic() - answer.moved_at
                return
            for message in self._keeper.hear(until):
                if message.get("id") in (number, None):
                    self._note(answer, message, expected)
            if answer.failures and first_failure is None:
                first_failure = time.monotonic()

    def _patience(self, answer: Answer) -> float:
        return VICTIM_SECONDS if self._misses_a_victim(answer) else ROOT_CAUSE_SECONDS

    def _misses_a_victim(self, answer: Answer) -> bool:
        """Whether the kernel ended a process of the tree, and none was heard to be lost."""
        killed = self._keeper.limit.oom_kills() > self._kills_before
        return killed and not any(failure.get("event") == "lost" for failure in answer.failures)

    def _note(self, answer: Answer, message: Message, expected: str) -> None:
        event, rank = message.get("event"), message.get("rank", 0)
        moving = _moving(message)
        if moving is not None:
            answer.moved_at, answer.moving = time.monotonic(), moving
        if event == "ready":
            self._keeper.warm = True
            self._keeper.versions.update(message.get("versions") or {})
        if event == "phase" and message.get("phase") in PHASES:
            answer.phases[rank] = message["phase"]
            self._keeper.enter(message["phase"])
        elif event == expected:
            answer.results[rank] = message
        elif event == "failed":
            answer.failures.append(message)
        elif event == "lost" and not _known_to_end(answer, message, rank):
            answer.results.pop(rank, None)
            answer.failures.append(message)
        elif event == "unready":
            raise self._cannot_import(message["error"])

    def _cannot_import(self, error: Message) -> TrainingEnvironmentError:
        lines = [install_line(self._keeper.python, package, span) for package, span in self._keeper.supported.items()]
        words = f"{error.get('type')}: {str(error.get('text')).strip()}"[-500:]
        what = f"The training environment behind {self._keeper.python} cannot be imported ({words})."
        return TrainingEnvironmentError(" ".join([what, *lines]))


def _moving(message: Message) -> str | None:
    """In words, what only somebody says who goes on; None for any other event."""
    told = {"phase": f"phase {message.get('phase')} began", "cycle": f"cycle {message.get('done')} ended"}
    return str(message.get("words")) if message.get("event") == "moves" else told.get(str(message.get("event")))


def _known_to_end(answer: Answer, lost: Message, rank: int) -> bool:
    """It has failed, and that is told; or it has answered, and said that it would not stay: its peers may still be at work."""
    if any(known.get("rank") == rank for known in answer.failures):
        return True
    return answer.results.get(rank, {}).get("stays") is False and lost.get("exit") == 0

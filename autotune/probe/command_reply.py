"""Messages of the ranks in reply to one command."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from autotune.core.measurement import Phase
from autotune.probe.message_validation import RankResult, rank_result
from autotune.worker.protocol import LOST, Message


@dataclass(kw_only=True)
class CommandReply:
    """Messages of the ranks in reply to one command."""

    results: dict[int, Message] = field(default_factory=dict)  # `loaded` or `measured`, by rank
    failures: list[Message] = field(default_factory=list)  # `failed` and `lost`, as they arrived
    phases: dict[int, Phase] = field(default_factory=dict)  # Last reported phase, by rank
    timed_out: bool = False

    moved_at: float = field(default_factory=time.monotonic)
    """Time of the last sign of progress; of the command itself at first."""

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
        for failure in self.failures:
            has_status = failure.get("signal") is not None or failure.get("exit") is not None
            if failure.get("event") == LOST and not has_status:
                return True
        return False

    def phase_of(self, rank: int | None) -> Phase | None:
        """Return the rank's last phase; any rank's if that one reported none."""
        if rank in self.phases:
            return self.phases[rank]
        return next(iter(self.phases.values()), None)


def results_of(reply: CommandReply) -> list[RankResult]:
    """Return the results in rank order, then the partial results of failed ranks."""
    return [rank_result(report) for report in reports_of(reply)]


def results_by_rank(reply: CommandReply) -> dict[int, RankResult]:
    results = {}
    for report in reports_of(reply):
        if report.get("rank") is not None:
            results[int(report["rank"])] = rank_result(report)
    return results


def reports_of(reply: CommandReply) -> list[Message]:
    return [*(reply.results[rank] for rank in sorted(reply.results)), *reply.failures]

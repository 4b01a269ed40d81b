"""Reports of a failure, and the finding about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from autotune.core.job import DeviceKind
from autotune.core.measurement import Outcome, Phase
from autotune.failures.numbers import Numbers
from autotune.failures.table import MEMORY_CAUSES


@dataclass(frozen=True, kw_only=True)
class ReportedException:
    """Exception as a rank reported it."""

    chain: Sequence[tuple[str, str]]  # type and text of the exception, then of its cause, and so on
    frames: Sequence[str] = ()  # as `file:function`, innermost last
    phase: Phase | None = None
    device: DeviceKind = "cpu"
    limit_hit: bool = False  # the kernel killed a process of the tree for lack of memory meanwhile

    printed: str = ""
    """Output of the probe's processes, which holds the first error when a wrapper was raised."""


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """Exit of a process without a message."""

    signal: int | None = None
    exit: int | None = None
    phase: Phase | None = None
    device: DeviceKind = "cpu"
    out_of_memory: Literal["limit", "machine", "others"] | None = None
    """Memory that ran out according to the kernel: the limit's, the machine's for what this process
    used, or the machine's for what others used."""

    printed: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    outcome: Outcome
    evidence: str  # line that decided it
    cause: str | None = None
    phase: Phase | None = None

    numbers: Numbers = field(default_factory=dict)
    """Figures of the message, described in tables/meanings.yaml."""

    row: str | None = None  # name of the row that matched
    secondary: bool = False  # another process probably failed first
    transient: bool = False  # no verdict on the candidate

    from_outside: bool = False
    """Ended by a signal of another process: no verdict on the candidate either."""

    @property
    def is_memory(self) -> bool:
        return self.cause in MEMORY_CAUSES and not self.transient

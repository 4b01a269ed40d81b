"""Whose memory it is: one reading of a GPU split between the probe and others. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

HIDDEN = "NVML gives no bytes per process here"
ELSEWHERE = "NVML numbers processes as outside of this container"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A GPU at one moment."""

    used_bytes: int
    processes: Mapping[int, int | None] | None
    """Bytes by process; None where NVML does not list them."""

    why: str | None = None
    """Why it does not."""

    def bytes_of(self, pids: Collection[int]) -> int:
        """What these hold together, as far as it is told."""
        return sum(used or 0 for pid, used in (self.processes or {}).items() if pid in pids)


@dataclass(frozen=True, kw_only=True)
class Split:
    """A reading, split."""

    foreign_bytes: int
    """Held by others or booked to nobody: the device's used bytes less this are the probe's."""

    listed_bytes: int | None
    """What the probe's processes are given in NVML's list; None where that does not tell."""

    others: Mapping[int, int]
    """Others by process, as far as listed."""

    why: str | None
    """Why the list does not tell whose it is; None where it does."""


def split(now: Reading, before: Reading, ours: Collection[int], is_here: Callable[[int], bool]) -> Split:
    """What of `now` belongs to the processes `ours`, which held nothing `before`.

    By the list of processes where that tells; otherwise everything beyond what was used before is taken for ours.
    """
    why = _why_not(now, before, ours, is_here)
    if why is not None:
        return Split(foreign_bytes=before.used_bytes, listed_bytes=None, others={}, why=why)
    listed, earlier = now.processes or {}, before.processes or {}
    others = {pid: used or 0 for pid, used in listed.items() if pid not in ours}
    booked_to_nobody = max(0, before.used_bytes - sum(used or 0 for used in earlier.values()))
    return Split(foreign_bytes=booked_to_nobody + sum(others.values()), listed_bytes=now.bytes_of(ours), others=others, why=None)


def newcomers(split_now: Split, before: Reading) -> dict[int, int]:
    """By how much others hold more than before."""
    earlier = before.processes or {}
    grown = {pid: used - (earlier.get(pid) or 0) for pid, used in split_now.others.items()}
    return {pid: growth for pid, growth in grown.items() if growth > 0}


def _why_not(now: Reading, before: Reading, ours: Collection[int], is_here: Callable[[int], bool]) -> str | None:
    if now.processes is None or before.processes is None:
        return now.why or before.why or HIDDEN
    if any(used is None for used in (*now.processes.values(), *before.processes.values())):
        return HIDDEN
    strangers = [pid for pid in now.processes if pid not in before.processes and pid not in ours and not is_here(pid)]
    if strangers and not any(pid in ours for pid in now.processes):
        return ELSEWHERE
    return None

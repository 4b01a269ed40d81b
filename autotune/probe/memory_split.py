"""Attribution of one reading of a GPU to the probe and to other processes. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

HIDDEN = "NVML gives no bytes per process here"
ELSEWHERE = "NVML reports process numbers from outside of this container"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Memory of a GPU at one moment."""

    used_bytes: int
    processes: Mapping[int, int | None] | None  # Bytes by pid; None where NVML does not list them
    why: str | None = None  # Reason why NVML does not


@dataclass(frozen=True, kw_only=True)
class Split:
    """A reading, attributed."""

    foreign_bytes: int  # Bytes of others or of no listed process: probe = used - foreign
    listed_bytes: int | None  # Bytes of the probe's processes in NVML's list; None where the list is unusable
    others: Mapping[int, int]  # Bytes of listed other processes, by pid
    why: str | None  # Reason why the list is unusable; None where it is usable


def split(
    now: Reading, before: Reading, ours: Collection[int], is_here: Callable[[int], bool], *, own_namespace: bool = False
) -> Split:
    """Attribute `now` to the processes `ours`, which held nothing `before`: a number that did is
    another process's.

    `own_namespace`: this process is in a PID namespace of its own, as in containers. NVML's numbers
    may then be the host's, and equal ours by chance.

    With a usable process list: foreign = unlisted bytes before + sum of listed others.
    Otherwise: foreign = used before.
    """
    ours = set(ours) - set(before.processes or {})
    why = _unusable(now, before, ours, is_here, own_namespace)
    if why is not None:
        return Split(foreign_bytes=before.used_bytes, listed_bytes=None, others={}, why=why)
    listed, earlier = now.processes or {}, before.processes or {}
    others = {pid: used or 0 for pid, used in listed.items() if pid not in ours}
    own = sum(used or 0 for pid, used in listed.items() if pid in ours)
    unlisted = max(0, before.used_bytes - sum(used or 0 for used in earlier.values()))
    return Split(foreign_bytes=unlisted + sum(others.values()), listed_bytes=own, others=others, why=None)


def newcomers(split_now: Split, before: Reading) -> dict[int, int]:
    """Return the growth of other processes since `before`, by pid."""
    earlier = before.processes or {}
    grown = {pid: used - (earlier.get(pid) or 0) for pid, used in split_now.others.items()}
    return {pid: growth for pid, growth in grown.items() if growth > 0}


def _unusable(
    now: Reading, before: Reading, ours: Collection[int], is_here: Callable[[int], bool], own_namespace: bool
) -> str | None:
    if now.processes is None or before.processes is None:
        return now.why or before.why or HIDDEN
    if any(used is None for used in (*now.processes.values(), *before.processes.values())):
        return HIDDEN
    if own_namespace and not all(is_here(pid) for pid in now.processes):
        return ELSEWHERE  # a driver that translated the numbers would list visible processes only
    strangers = [pid for pid in now.processes if pid not in before.processes and pid not in ours and not is_here(pid)]
    if strangers and not any(pid in ours for pid in now.processes):
        return ELSEWHERE
    return None

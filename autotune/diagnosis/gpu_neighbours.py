"""Other processes on the failing GPU, as far as a log names them: foreign ones, or other roles of the same job."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autotune.core.units import GIB, KIB, MIB, format_bytes
from autotune.failures.classify import Finding
from autotune.failures.numbers import NEIGHBOUR

_PID = re.compile(r"(?:\x1b\[\d+m)?\(\w[^()]{0,80}\bpid=(\d{1,10})")
_MOST_PIDS = 4096

_SHARES_GPUS = re.compile(r"/(?:verl|openrlhf|orz|slime|areal|skyrl(?:_train)?|nemo_rl|open_instruct)/")
"""Trainers that run several roles of one job on the same GPU, each in a process."""

_LISTED = re.compile(r"^\|\s+\d+\s+\S+\s+\S+\s+(\d{1,10})\s+C(?:\+G)?\s+(\S.*?)\s+(\d{1,8})MiB\s*\|")
"""Process in the output of nvidia-smi."""

_HOLDS = re.compile(r"Process (\d{1,10}) has (\d{1,6}(?:\.\d{1,3})?) ([KMG]iB) memory in use")
"""Process in torch's message."""

_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB}
MOST_NAMED = 4
UNSEEN_SHARE = 0.5
"""Share of the device, neither free nor in torch's list of processes, from which another container is assumed."""

_BEGUN = ("%|", "info", "pid=", "traceback", "loss")
"""Words of which a running job's lines contain one: earlier output of nvidia-smi lists processes from before the run."""


class GpuNeighbours:
    """Collector of process numbers. It receives every line; its size does not grow with the log."""

    def __init__(self) -> None:
        self._own: set[str] = set()
        self._earlier: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._begun = False

    def feed(self, raw: str, lowered: str) -> None:
        if "pid=" in raw and (pid := _PID.match(raw)) is not None and len(self._own) < _MOST_PIDS:
            self._own.add(pid[1])
        if self._begun:
            return
        if (listed := _LISTED.match(raw)) is not None and len(self._earlier) < _MOST_PIDS:
            self._earlier[listed[1]] = int(listed[3]) * 2**20
            self._names[listed[1]] = listed[2]
        self._begun = any(map(lowered.__contains__, _BEGUN)) and "nvidia" not in lowered

    def are_own(self, evidence: str, frames: Sequence[str], phase: str | None) -> bool:
        """Return True if the listed processes belong to the job: they print into the same log, or
        share its GPUs as actors.

        Containers number processes anew, so that torch's numbers may be in no line of the log.
        While the job loads and does not hold its share yet, a foreign process is the better guess.
        """
        if self._own.issuperset(NEIGHBOUR.findall(evidence)):
            return True
        return bool(self._own) and phase != "load" and any(map(_SHARES_GPUS.search, frames))

    def hold_most_unseen(self, finding: Finding, frames: Sequence[str]) -> bool:
        """Return True if processes that torch does not list hold most of a device that no other role
        of the job shares. The driver and its contexts are in no list either."""
        total, free, own = (finding.numbers.get(name) for name in ("total_bytes", "free_bytes", "process_bytes"))
        if finding.row != "cuda_out_of_memory" or total is None or free is None or own is None:
            return False
        unlisted = total - free - own - finding.numbers.get("others_bytes", 0)
        return unlisted >= UNSEEN_SHARE * total and not any(map(_SHARES_GPUS.search, frames))

    def leave_too_little(self, finding: Finding) -> bool:
        """Return True if memory that others held before the run is the memory that vLLM lacked at its start."""
        others = sum(held for pid, held in self._earlier.items() if pid not in self._own)
        free, asked = finding.numbers.get("free_bytes"), finding.numbers.get("asked_bytes")
        if finding.row != "vllm_reservation" or free is None or asked is None:
            return False
        return others >= GIB and free + others >= asked

    def remarks(self, evidence: str) -> tuple[str, ...]:
        """Return a sentence with the foreign processes on the GPU, as far as the log names them."""
        held = {pid: float(size) * _UNITS[unit] for pid, size, unit in _HOLDS.findall(evidence)}
        foreign = {pid: size for pid, size in {**self._earlier, **held}.items() if pid not in self._own}
        if not foreign:
            return ()
        largest = sorted(foreign, key=foreign.__getitem__, reverse=True)[:MOST_NAMED]
        named = ", ".join(f"{pid} ({self._names.get(pid, 'name unknown')}, {format_bytes(foreign[pid])})" for pid in largest)
        return (f"Processes of others on the GPU: {named}. See `ps -fp {largest[0]}` on that machine.",)

"""Processes on the failing GPU: foreign ones, or other roles of the same job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autotune.core.units import GIB, KIB, MIB, format_bytes
from autotune.diagnosis.log_endings import MOST_PROCESSES
from autotune.failures.findings import Finding
from autotune.failures.numbers import NEIGHBOUR, Numbers

_PID = re.compile(r"(?:\x1b\[\d+m)?\(\w[^()]{0,80}\bpid=(\d{1,10})")

# Trainers that run several roles of one job on the same GPU, each in a process.
_SHARES_GPUS = re.compile(
    r"/(?:verl|openrlhf|orz|slime|areal|skyrl(?:_train)?|nemo_rl|open_instruct)/"
)

# Process in the output of nvidia-smi.
_LISTED = re.compile(
    r"^\|\s+\d+\s+\S+\s+\S+\s+(\d{1,10})\s+C(?:\+G)?\s+(\S.*?)\s+(\d{1,8})MiB\s*\|"
)

# Process in torch's message.
_HOLDS = re.compile(r"Process (\d{1,10}) has (\d{1,6}(?:\.\d{1,3})?) ([KMG]iB) memory in use")
_OWN = re.compile(r"this process has (\d{1,6}(?:\.\d{1,3})?) ([KMG]iB) memory in use")
_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB}
MOST_NAMED = 4

# Share of the device, neither free nor in torch's list of processes, from which on another
# container is assumed.
UNSEEN_SHARE = 0.5
MIN_UNLISTED_BYTES = 2 * GIB  # More than a process's context and kernels outside torch

# Rows of torch's message, today's and the one before release 2.1.
_TORCHS_ROWS = ("cuda_out_of_memory", "cuda_out_of_memory_old")

# Words of which a running job's lines contain one: earlier output of nvidia-smi lists processes
# from before the run.
_BEGUN = ("%|", "info", "pid=", "traceback", "loss")


LIKE_SHARE = 0.9
"""Ranks of one job hold as much as each other, to this share, while they load the same model."""


def are_ranks_of_one_job(evidence: str, rank: int | None) -> bool:
    """Return True if a later rank computes on the first GPU, among processes that hold about as
    much as each other.
    """
    if not rank or "GPU 0 has" not in evidence:
        return False
    listed = [(size, unit) for _, size, unit in _HOLDS.findall(evidence)]
    sizes = [float(size) * _UNITS[unit] for size, unit in [*listed, *_OWN.findall(evidence)]]
    return len(sizes) > 1 and min(sizes) >= LIKE_SHARE * max(sizes)


class GpuNeighbours:
    """Collector of process numbers. It receives every line; its size does not grow with the log."""

    def __init__(self) -> None:
        self._own: set[str] = set()  # processes of this job
        self._earlier: dict[str, int] = {}  # process -> bytes that it held before the run
        self._names: dict[str, str] = {}
        self._begun = False

    def feed(self, raw: str, lowered: str) -> None:
        has_room = len(self._own) < MOST_PROCESSES
        if "pid=" in raw and has_room:
            prefix = _PID.match(raw)
            if prefix is not None:
                self._own.add(prefix[1])
        if self._begun:
            return
        listed = _LISTED.match(raw)
        has_room = len(self._earlier) < MOST_PROCESSES
        if listed is not None and has_room:
            pid, name, mib = listed.groups()
            self._earlier[pid] = int(mib) * MIB
            self._names[pid] = name
        has_begun = any(word in lowered for word in _BEGUN)
        self._begun = has_begun and "nvidia" not in lowered

    def are_own(
        self,
        evidence: str,
        frames: Sequence[str],
        phase: str | None,
    ) -> bool:
        """Return True if the listed processes belong to the job: they print into the same log, or
        share its GPUs as actors.

        Containers number processes anew, so that torch's numbers may be in no line of the log.
        While the job loads and does not hold its share yet, a foreign process is the better guess.
        """
        neighbours = NEIGHBOUR.findall(evidence)
        if self._own.issuperset(neighbours):
            return True
        if not self._own or phase == "load":
            return False
        return any(map(_SHARES_GPUS.search, frames))

    def hold_most_unseen(self, finding: Finding, frames: Sequence[str]) -> bool:
        """Return True if processes that torch does not list hold most of a device that no other
        role of the job shares. The driver and its contexts are in no list either.
        """
        total = finding.numbers.get("total_bytes")
        free = finding.numbers.get("free_bytes")
        process = _process_bytes(finding.numbers)
        if finding.row not in _TORCHS_ROWS:
            return False
        if total is None or free is None or process is None:
            return False
        others_bytes = finding.numbers.get("others_bytes", 0)
        unlisted = total - free - process - others_bytes
        if unlisted < UNSEEN_SHARE * total:
            return False
        return not any(map(_SHARES_GPUS.search, frames))

    def leave_too_little(self, finding: Finding) -> bool:
        """Return True if memory that others held before the run is the memory that vLLM lacked
        at its start.
        """
        free_bytes = finding.numbers.get("free_bytes")
        asked_bytes = finding.numbers.get("asked_bytes")
        if finding.row != "vllm_reservation":
            return False
        if free_bytes is None or asked_bytes is None:
            return False
        foreign = self._foreign(self._earlier)
        foreign_bytes = sum(foreign.values())
        return foreign_bytes >= GIB and free_bytes + foreign_bytes >= asked_bytes

    def remarks(self, evidence: str, rank: int | None) -> tuple[str, ...]:
        """Return sentences on the foreign processes on the GPU, as far as the log names them."""
        if are_ranks_of_one_job(evidence, rank):
            sentence = (
                f"Rank {rank} computes on GPU 0, where each process holds about as much: they are"
                " the ranks of one job."
            )
            return (sentence,)
        return (*self._foreign_processes(evidence), *self._later_rank(evidence, rank))

    def _foreign_processes(self, evidence: str) -> tuple[str, ...]:
        sizes: dict[str, float] = dict(self._earlier)
        for pid, size, unit in _HOLDS.findall(evidence):
            unit_bytes = _UNITS[unit]
            sizes[pid] = float(size) * unit_bytes
        foreign = self._foreign(sizes)
        if not foreign:
            return ()
        largest_first = sorted(foreign, key=foreign.__getitem__, reverse=True)
        largest = largest_first[:MOST_NAMED]
        processes = []
        for pid in largest:
            name = self._names.get(pid, "name unknown")
            processes.append(f"{pid} ({name}, {format_bytes(foreign[pid])})")
        listed = ", ".join(processes)
        advice = f"See `ps -fp {largest[0]}` on that machine."
        return (f"Processes of others on the GPU: {listed}. {advice}",)

    def remarks_without_list(self, finding: Finding) -> tuple[str, ...]:
        """Return a sentence on memory that is neither free nor torch's, where torch names no
        processes: messages before torch 2.1 do not.
        """
        if NEIGHBOUR.search(finding.evidence):
            return ()
        numbers = finding.numbers
        total = numbers.get("total_bytes")
        free = numbers.get("free_bytes")
        allocated = numbers.get("allocated_bytes")
        if total is None or free is None or allocated is None or "process_bytes" in numbers:
            return ()
        unlisted_bytes = total - free - allocated - numbers.get("idle_bytes", 0)
        if unlisted_bytes < MIN_UNLISTED_BYTES:
            return ()
        sentence = (
            f"{format_bytes(unlisted_bytes)} of the GPU is neither free nor torch's: other"
            " processes (see nvidia-smi), or an engine that keeps its memory outside torch."
        )
        return (sentence,)

    def _later_rank(self, evidence: str, rank: int | None) -> tuple[str, ...]:
        """Return a sentence if a later rank computes on the first GPU, among other processes."""
        if not rank or "GPU 0 has" not in evidence or not NEIGHBOUR.search(evidence):
            return ()
        sentence = (
            f"Rank {rank} computes on GPU 0 with other processes. If they are ranks of the same"
            " job, each has to choose its own GPU: torch.cuda.set_device(LOCAL_RANK)."
        )
        return (sentence,)

    def _foreign(self, bytes_by_process: Mapping[str, float]) -> dict[str, float]:
        foreign = {}
        for pid, size in bytes_by_process.items():
            if pid not in self._own:
                foreign[pid] = size
        return foreign


def _process_bytes(numbers: Numbers) -> int | float | None:
    """Return the device memory of the failing process.

    Without the driver's figure, it is what torch reserved: old releases lack that figure, and
    containers report 0 or an overflow.
    """
    allocated = numbers.get("allocated_bytes")
    if allocated is None:
        return numbers.get("process_bytes")
    reserved = allocated + numbers.get("idle_bytes", 0)
    by_driver = numbers.get("process_bytes", 0)
    total = numbers.get("total_bytes", 0)
    if reserved <= by_driver <= total:
        return by_driver
    return reserved

"""Facts of a log beside its failures: how it ends, and which processes held the memory.

Each collector receives lines and does not grow with the log. Endings: finished, no number any more,
or given up after several tries. Processes: those on the failing GPU, foreign ones or other roles of
the same job; and on the host the one that was ended and the one that held most. The kernel and Ray
choose a victim by rules of their own. Its death is the symptom; the largest holder of memory is the
cause.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence

from autotune.core.units import GIB, KIB, MIB, format_bytes
from autotune.failures.findings import Finding
from autotune.failures.log_lines import read_line
from autotune.failures.numbers import NEIGHBOUR, Numbers
from autotune.failures.table import LINES, expand

# Consecutive steps without a finite loss or gradient after which training does not recover.
STEPS_OF_NO_NUMBERS = 3

# Caught out-of-memory errors in the last lines from which on they are the reason for the end.
TIMES_CAUGHT = 3
_LAST_LINES = 12

_STEP = re.compile(expand(LINES.step))
_FINISHED = re.compile(expand(LINES.finished), re.IGNORECASE)
_ENDED = re.compile(expand(LINES.ended), re.IGNORECASE)
_SPAWNED = re.compile(r"process (\d{1,10}) spawned with command")
_EXITED = re.compile(r"Process (\d{1,10}) exits successfully")
_MOST_PROCESSES = 4096
_ENDED_BADLY = re.compile(r"\bexit code:? [1-9]")
_CAUGHT = re.compile(r"\b(?:CUDA|HIP) out of memory\.?(?: Tried to allocate .{0,2000})?\s*\Z")
_NO_NUMBER = re.compile(expand(LINES.no_number), re.IGNORECASE)
_UPDATE_LEFT_OUT = re.compile(expand(LINES.update_left_out), re.IGNORECASE)


class LogEndings:
    """Collector of endings. It receives the lines that contain one of WORDS.of_endings."""

    def __init__(self) -> None:
        self.finished = ""
        """Line that reports the end of training, whatever was printed before it."""

        self.finished_last = False
        """True where the last line that counted was such a one, not a step."""

        self._ended = ""
        self._no_numbers: list[str] = []
        self._update_left_out = False
        self._caught: deque[tuple[int, str]] = deque(maxlen=TIMES_CAUGHT)
        self._spawned: set[str] = set()
        self._launched = False

    @property
    def without_failure(self) -> str:
        """Return the line that reports a normal end, empty where something failed."""
        return self.finished or self._ended

    @property
    def without_numbers(self) -> str:
        """Return the first of the final steps without a finite number."""
        needed = STEPS_OF_NO_NUMBERS - self._update_left_out
        if len(self._no_numbers) < needed:
            return ""
        return self._no_numbers[0]

    def caught_before(self, position: int) -> str:
        """Return the last caught out-of-memory message if several are directly before this line."""
        if len(self._caught) < TIMES_CAUGHT:
            return ""
        first_position, _ = self._caught[0]
        _, last_message = self._caught[-1]
        if first_position < position - _LAST_LINES:
            return ""
        return last_message

    def feed(self, raw: str, position: int) -> bool:
        """Return True for the line of a step, or one that reports the end of training."""
        if _STEP.search(raw) is not None:
            if _NO_NUMBER.search(raw) is None:
                self._no_numbers = []
                self._update_left_out = False
            elif len(self._no_numbers) < STEPS_OF_NO_NUMBERS:
                self._no_numbers.append(raw)
            self._ended = ""
            self.finished_last = False
            self._caught.clear()
            return True
        text = read_line(raw).text
        is_left_out = _UPDATE_LEFT_OUT.search(text) is not None
        self._update_left_out |= is_left_out
        if _FINISHED.match(text) is not None:
            self.finished = raw
            self.finished_last = True
            return True
        has_ended = _ENDED.match(text) is not None
        if has_ended or self._all_exited(text):
            self._ended = raw
        elif _ENDED_BADLY.search(text) is not None:
            self._ended = ""
        elif _CAUGHT.search(text) is not None:
            self._caught.append((position, raw))
        return False

    def _all_exited(self, text: str) -> bool:
        """Return True once all processes that a launcher started have exited successfully."""
        spawned = _SPAWNED.search(text)
        has_room = len(self._spawned) < _MOST_PROCESSES
        if spawned is not None and has_room:
            self._launched = True
            self._spawned.add(spawned[1])
        exited = _EXITED.search(text)
        if exited is None:
            return False
        if not self._launched:
            # A log that begins later than its launcher: a process without another message has
            # exited normally.
            return True
        self._spawned.discard(exited[1])
        return not self._spawned


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
        has_room = len(self._own) < _MOST_PROCESSES
        if "pid=" in raw and has_room:
            prefix = _PID.match(raw)
            if prefix is not None:
                self._own.add(prefix[1])
        if self._begun:
            return
        listed = _LISTED.match(raw)
        has_room = len(self._earlier) < _MOST_PROCESSES
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


_PAGE_BYTES = 4 * KIB

# Kernel: the victim, with its memory.
_KILLED = re.compile(
    r"Killed process (?P<pid>\d{1,10})"
    r" \((?P<name>[^)]{1,64})\).{0,120}?anon-rss:(?P<kib>\d{1,15})kB"
)

# Kernel: row of its table of tasks, `[pid] uid tgid total_vm rss ... name`.
_TASK = re.compile(
    r"\[\s*(?P<pid>\d{1,10})\]\s+\d{1,10}\s+\d{1,10}\s+\d{1,15}\s+(?P<pages>\d{1,15})\s+"
    r"(?:\d{1,15}\s+){0,4}\d{1,15}\s+-?\d{1,5}\s+(?P<name>\S.{0,80})"
)

# Ray's memory monitor: the header of its ten largest users, and one of them.
_RAY_TABLE = re.compile(r"PID\s+MEM\(GB\)\s+COMMAND")
_RAY_USER = re.compile(r"^(?P<pid>\d{1,10})\s+(?P<gib>\d{1,6}\.\d{1,3})\s+(?P<name>\S.{0,120})$")


class HostMemoryUsers:
    """Collector of processes. It receives every line; its size does not grow with the log."""

    def __init__(self) -> None:
        self._victim: tuple[str, int] | None = None  # process, bytes
        self._held_bytes: dict[str, int] = {}
        self._in_rays_table = False

    def feed(self, text: str) -> None:
        if self._in_rays_table:
            user = _RAY_USER.match(text.strip())
            if user is not None:
                user_bytes = round(float(user["gib"]) * GIB)
                self._note(user["pid"], user["name"], user_bytes)
                return
        self._in_rays_table = "MEM(GB)" in text and bool(_RAY_TABLE.search(text))
        if self._victim is None and "anon-rss:" in text:
            killed = _KILLED.search(text)
            if killed is not None:
                victim = _process(killed["pid"], killed["name"])
                self._victim = victim, int(killed["kib"]) * KIB
                return
        if "]" in text:
            task = _TASK.search(text)
            if task is not None:
                task_bytes = int(task["pages"]) * _PAGE_BYTES
                self._note(task["pid"], task["name"], task_bytes)

    def remarks(self) -> tuple[str, ...]:
        """Return one sentence about the victim and one about the largest holder, as far as the
        log has them.
        """
        sentences = []
        victim = None
        if self._victim is not None:
            victim, victim_bytes = self._victim
            sentences.append(f"The kernel ended {victim}, which held {format_bytes(victim_bytes)}.")
        largest = max(self._held_bytes, key=self._held_bytes.__getitem__, default=None)
        if largest is not None and largest != victim:
            size = format_bytes(self._held_bytes[largest])
            sentences.append(f"The most host memory was held by {largest}: {size}.")
        return tuple(sentences)

    def _note(
        self,
        pid: str,
        name: str,
        held_bytes: int,
    ) -> None:
        if len(self._held_bytes) < _MOST_PROCESSES:
            process = _process(pid, name.strip())
            self._held_bytes[process] = held_bytes


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


def _process(pid: str, name: str) -> str:
    return f"process {pid} ({name})"

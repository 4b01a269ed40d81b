"""Processes that held host memory: the one that was ended, and the one that held most.

The kernel and Ray choose a victim by rules of their own. Its death is the symptom; the largest
holder of memory is the cause.
"""

from __future__ import annotations

import re

from autotune.core.units import GIB, KIB, format_bytes
from autotune.diagnosis.log_endings import MOST_PROCESSES

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
        if len(self._held_bytes) < MOST_PROCESSES:
            process = _process(pid, name.strip())
            self._held_bytes[process] = held_bytes


def _process(pid: str, name: str) -> str:
    return f"process {pid} ({name})"

"""Processes in a log about exhausted host memory: the one that was ended, and the one that held most.

The kernel and Ray choose a victim by rules of their own. Its death is the symptom; the largest holder
of memory is the cause.
"""

from __future__ import annotations

import re

from autotune.core.units import GIB, KIB, format_bytes

_PAGE_BYTES = 4 * KIB
_MOST_PROCESSES = 4096

_KILLED = re.compile(r"Killed process (?P<pid>\d{1,10}) \((?P<name>[^)]{1,64})\).{0,120}?anon-rss:(?P<kib>\d{1,15})kB")
"""Kernel: the victim, with its memory."""

_TASK = re.compile(
    r"\[\s*(?P<pid>\d{1,10})\]\s+\d{1,10}\s+\d{1,10}\s+\d{1,15}\s+(?P<pages>\d{1,15})\s+(?:\d{1,15}\s+){0,4}\d{1,15}\s+-?\d{1,5}\s+(?P<name>\S.{0,80})"
)
"""Kernel: row of its table of tasks, `[pid] uid tgid total_vm rss ... name`."""

_RAY_USER = re.compile(r"^(?P<pid>\d{1,10})\s+(?P<gib>\d{1,6}\.\d{1,3})\s+(?P<name>\S.{0,120})$")
_RAY_TABLE = re.compile(r"PID\s+MEM\(GB\)\s+COMMAND")
"""Ray's memory monitor: the header of its ten largest users."""


class HostMemoryUsers:
    """Collector of processes. It receives every line; its size does not grow with the log."""

    def __init__(self) -> None:
        self._victim: tuple[str, int] | None = None
        self._held: dict[str, int] = {}
        self._in_rays_table = False

    def feed(self, text: str) -> None:
        if self._in_rays_table and (user := _RAY_USER.match(text.strip())) is not None:
            self._note(user["pid"], user["name"], round(float(user["gib"]) * GIB))
            return
        self._in_rays_table = "MEM(GB)" in text and _RAY_TABLE.search(text) is not None
        if "anon-rss:" in text and self._victim is None and (killed := _KILLED.search(text)) is not None:
            self._victim = f"process {killed['pid']} ({killed['name']})", int(killed["kib"]) * KIB
        elif "]" in text and (task := _TASK.search(text)) is not None:
            self._note(task["pid"], task["name"], int(task["pages"]) * _PAGE_BYTES)

    def remarks(self) -> tuple[str, ...]:
        """Return one sentence about the victim and one about the largest holder, as far as the log has them."""
        found = []
        if self._victim is not None:
            found.append(f"The kernel ended {self._victim[0]}, which held {format_bytes(self._victim[1])}.")
        largest = max(self._held, key=self._held.__getitem__, default=None)
        if largest is not None and (self._victim is None or largest != self._victim[0]):
            found.append(f"The most host memory was held by {largest}: {format_bytes(self._held[largest])}.")
        return tuple(found)

    def _note(self, pid: str, name: str, held: int) -> None:
        if len(self._held) < _MOST_PROCESSES:
            self._held[f"process {pid} ({name.strip()})"] = held

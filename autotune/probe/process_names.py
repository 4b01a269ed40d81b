"""Descriptions of the processes that hold memory of a GPU."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.units import MIB, format_bytes
from autotune.machine.nvml import GpuLost, Nvml, NvmlNotSupported

MIN_REPORTED_BYTES = 64 * MIB  # Drivers, displays and monitors hold less than this on an idle GPU


def name_of(pid: int, nvml: Nvml | None = None) -> str:
    """Return `python (pid 4711, ada)`, with the parts that are known."""
    import psutil

    try:
        process = psutil.Process(pid)
        return f"{process.name()} (pid {pid}, {process.username()})"
    except (psutil.Error, KeyError):
        pass
    try:
        name = nvml.process_name(pid) if nvml is not None else ""
    except (NvmlNotSupported, GpuLost):
        name = ""
    return f"{name.split()[0].rsplit('/', 1)[-1] if name.split() else 'a process outside this container'} (pid {pid})"


def in_words(held: Mapping[int, int | None], nvml: Nvml | None = None) -> tuple[str, ...]:
    """Describe each process with its bytes, the largest first."""
    ranked = sorted(held.items(), key=lambda one: -(one[1] or 0))
    return tuple(f"{name_of(pid, nvml)}: {'unknown' if used is None else format_bytes(used)}" for pid, used in ranked)


def named(words: tuple[str, ...]) -> str:
    """Join the descriptions; NVML lists none in some containers."""
    return ", ".join(words) or "processes that NVML does not list here"

"""Who else holds memory of a GPU, in words. Nobody is ended who was not started here."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.nvml import CardLost, NotTold, Nvml
from autotune.units import MIB, format_bytes

WORTH_NAMING_BYTES = 64 * MIB
"""Below it is what drivers, displays and monitors hold on an idle GPU."""


def name_of(pid: int, nvml: Nvml | None = None) -> str:
    """`python (pid 4711, ada)`, as far as that can be found out."""
    import psutil

    try:
        process = psutil.Process(pid)
        return f"{process.name()} (pid {pid}, {process.username()})"
    except (psutil.Error, KeyError):
        pass
    try:
        said = nvml.process_name(pid) if nvml is not None else ""
    except (NotTold, CardLost):
        said = ""
    return f"{said.split()[0].rsplit('/', 1)[-1] if said.split() else 'a process that cannot be seen from here'} (pid {pid})"


def in_words(held: Mapping[int, int | None], nvml: Nvml | None = None) -> tuple[str, ...]:
    """Everyone with something, the largest first."""
    ranked = sorted(held.items(), key=lambda one: -(one[1] or 0))
    return tuple(f"{name_of(pid, nvml)}: {'unknown' if used is None else format_bytes(used)}" for pid, used in ranked)


def named(words: tuple[str, ...]) -> str:
    """For the end of a sentence; who it is may not be told, in a container for one."""
    return ", ".join(words) or "processes that NVML does not name here"

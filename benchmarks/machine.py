"""Machine of a benchmark: printed first, and kept with every figure."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path


def facts(versions: Mapping[str, str]) -> dict[str, object]:
    """Machine, versions and date of this run."""
    kernel, _, _ = platform.release().partition("-")  # without the name of its build
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {kernel}",
        "versions": dict(versions),
        "commit": _commit(),
    }


def versions_text(versions: Mapping[str, str], separator: str = ", ") -> str:
    """Return the versions for readers, such as `torch 2.11, trl 1.7`."""
    return separator.join(f"{name} {version}" for name, version in versions.items())


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:  # no git, as on a machine for measurements alone
        return "unknown"
    return run.stdout.strip() or "unknown"

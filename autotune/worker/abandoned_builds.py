"""Locks that a killed process left on torch's builds of extensions.

Whoever loads an extension waits until the lock beside it is gone, without a time limit: a process
that is killed while DeepSpeed compiles makes every later training of this user wait forever.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

NETWORK_FILES = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "weka")
"""How the names of file systems begin whose files another machine may hold."""
LONGEST_BUILD_SECONDS = 1800.0


def release_abandoned_builds(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Remove the locks that no process holds any more, and return them."""
    root = _folder_of_builds(environment)
    # The locks first: one that is taken meanwhile is not among them.
    locks = [lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern)]
    if not locks:
        return []
    open_files = set(_open_files())
    if not open_files:  # a system that does not list them
        return []
    released = []
    for lock in locks:
        with contextlib.suppress(OSError):
            if _is_abandoned(lock, open_files):
                lock.unlink()
                released.append(lock)
    return released


def _folder_of_builds(environment: Mapping[str, str]) -> Path:
    """Return the folder that torch.utils.cpp_extension builds in."""
    folder = environment.get("TORCH_EXTENSIONS_DIR")
    if folder:
        return Path(folder)
    caches = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "torch_extensions"


def _is_abandoned(lock: Path, open_files: set[tuple[int, int]]) -> bool:
    status = lock.stat()
    if status.st_uid != os.getuid() or (status.st_dev, status.st_ino) in open_files:
        return False
    age = time.time() - status.st_mtime
    return age > LONGEST_BUILD_SECONDS or not _is_on_network(status.st_dev)


def _open_files() -> Iterator[tuple[int, int]]:
    """Return device and number of each file that a process of this user has open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            status = link.stat()
            yield status.st_dev, status.st_ino


def _is_on_network(device: int) -> bool:
    """Return True for a file system that other machines may use, or that is not known."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, file_system = line.partition(" - ")
            if mount.split()[2] == number:
                return file_system.startswith(NETWORK_FILES)
    return True

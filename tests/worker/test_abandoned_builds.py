"""Locks of torch's builds: its own FileBaton takes them, in processes that are killed or live."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.worker import abandoned_builds
from autotune.worker.abandoned_builds import release_abandoned_builds

TAKES_THE_LOCK = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("taken", flush=True)
time.sleep(600)
"""
Build = Callable[[Path], "subprocess.Popen[str]"]


@pytest.fixture
def build() -> Iterator[Build]:
    """Start a process that takes a lock as torch does, and builds for ever."""
    started = []

    def start(lock: Path) -> subprocess.Popen[str]:
        lock.parent.mkdir(parents=True)
        command = [sys.executable, "-c", TAKES_THE_LOCK, str(lock)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_only_the_lock_of_a_killed_build_goes(tmp_path: Path, build: Build) -> None:
    """One folder as torch names it with TORCH_EXTENSIONS_DIR, and one below a Python's name."""
    killed_lock = tmp_path / "killed" / "lock"
    living_lock = tmp_path / "py311_cpu" / "living" / "lock"
    killed = build(killed_lock)
    build(living_lock)
    killed.kill()
    killed.wait()
    assert release_abandoned_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == [killed_lock]
    assert not killed_lock.exists()
    assert living_lock.exists()


def test_the_folder_is_the_one_that_torch_builds_in(tmp_path: Path) -> None:
    caches = {"XDG_CACHE_HOME": str(tmp_path)}
    command = "from torch.utils import cpp_extension; print(cpp_extension.get_default_build_root())"
    torchs = subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, **caches},
        capture_output=True,
        text=True,
        check=True,
    )
    lock = Path(torchs.stdout.strip(), "py311_cpu", "extension", "lock")
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert release_abandoned_builds(caches) == [lock]


def test_another_machine_has_half_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process holds a lock on a shared disk, and cannot be seen from here."""
    monkeypatch.setattr(abandoned_builds, "_is_on_network", lambda device: True)
    locks = [tmp_path / name / "lock" for name in ("fresh", "old")]
    for lock in locks:
        lock.parent.mkdir()
        lock.touch()
    an_hour_ago = time.time() - 3600
    os.utime(locks[1], (an_hour_ago, an_hour_ago))
    assert release_abandoned_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == [locks[1]]

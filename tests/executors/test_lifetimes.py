"""However the process that runs an executor ends, nothing that it started stays."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.probe.worker_process import WorkerProcess
from tests.probe.toys import environment, gone, settings, tree_of

SCRIPT = (Path(__file__).parent / "programs/lifetime.py.txt").read_text()


def start(folder: Path, *, warm_seconds: float = 0.0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(warm_seconds)], env=environment()
    )


def wait_for(file: Path) -> int:
    deadline = time.monotonic() + 20
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline, f"{file.name} never came"
        time.sleep(0.01)
    return int(file.read_text())


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name
)
def test_probes_exit_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    parent = start(tmp_path)
    grandchild, worker = wait_for(tmp_path / "grandchild"), wait_for(tmp_path / "keeper")
    tree = tree_of(worker)
    assert len(tree) >= 3
    assert grandchild in tree
    parent.send_signal(number)
    assert parent.wait(timeout=10) == (-number if number == signal.SIGKILL else 128 + number)
    assert gone(*tree)
    if number != signal.SIGKILL:
        assert list((tmp_path / "scratch").iterdir()) == []


def test_worker_exits_if_its_parent_is_killed_during_imports(tmp_path: Path) -> None:
    parent = start(tmp_path, warm_seconds=30)
    worker = wait_for(tmp_path / "keeper")
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    assert gone(worker)


def test_folder_of_a_killed_parent_is_removed_by_the_next(tmp_path: Path) -> None:
    from autotune.probe.spawn import WorkFolder

    parent = start(tmp_path)
    worker = wait_for(tmp_path / "grandchild") and wait_for(tmp_path / "keeper")
    parent.kill()
    parent.wait()
    assert gone(worker)
    folders = list((tmp_path / "scratch").iterdir())
    assert len(folders) == 1
    following = WorkFolder(tmp_path / "scratch")
    assert not folders[0].exists()
    following.close()


def test_a_worker_that_is_ended_while_its_output_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot is closed from another thread, such as Ray's, in the middle of a probe's last
    message.
    """
    worker = WorkerProcess(settings(tmp_path))
    worker.start()
    try:
        assert worker._spawned is not None
        monkeypatch.setattr(worker._spawned.log, "settle", worker.end)
        assert isinstance(worker.printed_since(0), str)
        assert worker.printed_since(0) == ""
    finally:
        worker.close()

"""Folders of workers that start at the same moment."""

from __future__ import annotations

import threading
from pathlib import Path

from autotune.probe.spawn import WorkFolder

THREADS = 8
FOLDERS = 100  # of each thread


def test_no_slot_takes_anothers_new_folder_for_an_abandoned_one(tmp_path: Path) -> None:
    """Each opening removes folders whose owner is gone, while the others' are being made."""
    problems: list[Exception] = []
    barrier = threading.Barrier(THREADS)

    def open_folders() -> None:
        barrier.wait()
        try:
            for _ in range(FOLDERS):
                folder = WorkFolder(tmp_path)
                assert folder.scratch.is_dir()
                folder.close()
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=open_folders) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert list(tmp_path.iterdir()) == []

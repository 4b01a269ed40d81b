"""Reports of processes that ended: what a launcher, Ray or vLLM called them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.emulator import reports


def write_report(
    folder: Path,
    pid: int,
    together: int = 0,
) -> None:
    """Write the report of a process during which all processes held so much of the second card."""
    content = bytearray(
        reports._HEAD.size
        + 4 * reports._PEAKS.size
        + reports.PHASE_BYTES * (reports.NAME_BYTES + reports._PEAKS.size)
    )
    reports._HEAD.pack_into(content, 0, reports.MAGIC, reports.VERSION, pid, 0, 0, 0, 0, 0, 0, 0, 0)
    reports._PEAKS.pack_into(
        content,
        reports._HEAD.size + 3 * reports._PEAKS.size,
        0,
        together,
        *[0] * (reports.CARDS - 2),
    )
    (folder / f"{pid}-1a.report").write_bytes(content)


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::WorkerDict.actor_rollout_update_actor", "WorkerDict"),
        ("ray::WorkerDict", "WorkerDict"),
        ("VLLM::Worker_TP0", "Worker_TP0"),
        ("python", None),
        (None, None),
    ],
)
def test_the_title_of_rays_and_vllms_processes_is_their_role(
    title: str | None,
    role: str | None,
    tmp_path: Path,
) -> None:
    write_report(tmp_path, 7)
    if title is not None:
        (tmp_path / "7.title").write_text(title)
    (process,) = reports.read(tmp_path, ()).processes
    assert (process.pid, process.role, process.rank) == (7, role, None)


def test_a_cards_peak_is_of_all_its_processes(tmp_path: Path) -> None:
    for pid, together in ((7, 3 * 2**30), (8, 5 * 2**30)):
        write_report(tmp_path, pid, together)
    assert reports.read(tmp_path, ()).card_peak_bytes == {1: 5 * 2**30}

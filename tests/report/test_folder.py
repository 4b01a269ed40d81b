from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.core.errors import BadInput
from autotune.core.files import write_atomically
from autotune.report.output_folder import CLAIM, check_folder, claimed_folder, publish


def _writer(folder: Path, destination: Path) -> list[Path]:
    (folder / "data").mkdir()
    data, main, start = folder / "data" / "rows.txt", folder / "main.yaml", folder / "launch.sh"
    data.write_text("rows")
    main.write_text(f"data: {destination / 'data'}\n")
    start.write_text("#!/bin/sh\n")
    start.chmod(0o755)
    return [data, main, start]


def test_everything_arrives_and_names_its_neighbours_by_their_final_path(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    described = publish(out, _writer, lambda files: {"files": files}, str)
    assert (out / "main.yaml").read_text() == f"data: {out / 'data'}\n"
    assert (out / "data" / "rows.txt").read_text() == "rows"
    assert (out / "launch.sh").stat().st_mode & 0o111
    assert json.loads((out / "recommendation.json").read_text()) == described
    assert described["files"] == [
        str(out / "data/rows.txt"),
        str(out / "main.yaml"),
        str(out / "launch.sh"),
    ]
    assert sorted(path.name for path in out.iterdir()) == [
        "data",
        "launch.sh",
        "main.yaml",
        "recommendation.json",
        "report.html",
    ]
    assert (out / "report.html").read_text() == str(described)


def test_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    described = publish(Path("out"), _writer, lambda files: {"files": files}, str)
    assert described["files"] == ["out/data/rows.txt", "out/main.yaml", "out/launch.sh"]
    assert (tmp_path / "out" / "main.yaml").read_text() == f"data: {tmp_path / 'out' / 'data'}\n"


def test_a_second_answer_takes_the_place_of_the_first(tmp_path: Path) -> None:
    publish(tmp_path, _writer, lambda files: {"answer": 1}, str)
    (tmp_path / "data" / "stale.txt").touch()
    (tmp_path / "study.db").write_text("kept")
    publish(tmp_path, _writer, lambda files: {"answer": 2}, str)
    assert json.loads((tmp_path / "recommendation.json").read_text()) == {"answer": 2}
    assert not (tmp_path / "data" / "stale.txt").exists()
    assert (tmp_path / "study.db").read_text() == "kept"


@pytest.mark.parametrize(
    "fault", [OSError(28, "No space left on device"), RuntimeError("a bug"), KeyboardInterrupt()]
)
def test_a_fault_while_writing_leaves_what_was_there(tmp_path: Path, fault: BaseException) -> None:
    publish(tmp_path, _writer, lambda files: {"answer": 1}, str)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def broken(folder: Path, destination: Path) -> list[Path]:
        _writer(folder, destination)
        raise fault

    with pytest.raises(BadInput if isinstance(fault, OSError) else type(fault)):
        publish(tmp_path, broken, lambda files: {"answer": 2}, str)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_checking_leaves_no_trace(tmp_path: Path) -> None:
    check_folder(tmp_path / "not" / "yet" / "there")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(BadInput, match="is a file"):
        check_folder(tmp_path / "out")
    with pytest.raises(BadInput, match="can't be written: Not a directory"):
        check_folder(tmp_path / "out" / "below")


def test_a_busy_folder_is_refused_with_whose_it_is(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with claimed_folder(out):
        whose = rf"in use by process {os.getpid()} on .*, since \d{{4}}-.* UTC.*--out FOLDER"
        with pytest.raises(BadInput, match=whose), claimed_folder(out):
            pass
        assert [path.name for path in out.iterdir()] == [CLAIM]
    assert not (tmp_path / "deep").exists(), "an unused folder was left"
    with claimed_folder(out):
        (out / "result").touch()
    assert [path.name for path in out.iterdir()] == ["result"]


def test_a_killed_run_leaves_the_folder_free(tmp_path: Path) -> None:
    program = "import os, sys, pathlib\nfrom autotune.report.output_folder import claimed_folder\n"
    program += "with claimed_folder(pathlib.Path(sys.argv[1])):\n    os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)]).returncode == -9
    assert (tmp_path / CLAIM).exists()
    with claimed_folder(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_deleted_meanwhile(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with claimed_folder(out):
        shutil.rmtree(out)
        publish(out, _writer, lambda files: {"answer": 1}, str)
        with claimed_folder(out):  # a newer run's claim is not removed by the older run
            pass
    assert json.loads((out / "recommendation.json").read_text()) == {"answer": 1}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_are_as_readable_as_the_umask_says(
    umask: int,
    mode: int,
    tmp_path: Path,
) -> None:
    before = os.umask(umask)
    try:
        publish(tmp_path, _writer, lambda files: {}, str)
        write_atomically(tmp_path / "one", b"")
    finally:
        assert os.umask(before) == umask
    modes = {
        path.name: path.stat().st_mode & 0o777
        for path in tmp_path.iterdir()
        if path.name != "launch.sh" and path.is_file()
    }
    assert modes == dict.fromkeys(("main.yaml", "recommendation.json", "report.html", "one"), mode)
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o777 & ~umask

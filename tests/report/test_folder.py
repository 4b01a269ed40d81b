from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.errors import BadInput
from autotune.report.folder import check_folder, publish


def _writer(folder: Path) -> list[Path]:
    (folder / "data").mkdir()
    data, main, start = folder / "data" / "rows.txt", folder / "main.yaml", folder / "launch.sh"
    data.write_text("rows")
    main.write_text(f"data: {folder.resolve() / 'data'}\n")
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
    assert described["files"] == [str(out / "data/rows.txt"), str(out / "main.yaml"), str(out / "launch.sh")]
    assert sorted(path.name for path in out.iterdir()) == ["data", "launch.sh", "main.yaml", "recommendation.json", "report.html"]
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


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), RuntimeError("a bug"), KeyboardInterrupt()])
def test_a_fault_while_writing_leaves_what_was_there(tmp_path: Path, fault: BaseException) -> None:
    publish(tmp_path, _writer, lambda files: {"answer": 1}, str)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def broken(folder: Path) -> list[Path]:
        _writer(folder)
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

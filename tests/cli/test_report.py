"""`autotune report` and `autotune dashboard`, as programs."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.cli.command import PROGRAM, autotune, environment
from tests.report.html.documents import EXAMPLE


def test_a_page_is_made_from_a_folder(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path / "recommendation.json")
    done = autotune("report", ".", cwd=tmp_path)
    assert (done.code, done.out) == (0, "Written: report.html\n")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    result = autotune(
        "report", "recommendation.json", "--to", "a page.html", "--json", cwd=tmp_path
    )
    assert result.document == {"schema": 1, "page": "a page.html"}
    assert (tmp_path / "a page.html").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read"),
        ("", "holds no JSON"),
        ("[]", "has unexpected content"),
        ("{}", "schema"),
        ("\x00\xff", "holds no JSON"),
    ],
)
def test_a_file_without_an_answer_is_refused(
    tmp_path: Path,
    content: str | None,
    message: str,
) -> None:
    if content is not None:
        (tmp_path / "recommendation.json").write_bytes(content.encode("latin-1"))
    done = autotune("report", ".", cwd=tmp_path)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path / "recommendation.json")
    done = autotune("report", ".", "--to", "no/such/folder/page.html", cwd=tmp_path)
    assert done.code == 2
    assert "can't be written" in done.err
    folder = autotune("report", ".", "--to", ".", cwd=tmp_path)
    assert folder.code == 2
    assert "is a folder" in folder.err


def test_the_dashboard_serves_until_it_is_ended(tmp_path: Path) -> None:
    import optuna

    optuna.create_study(
        study_name="one",
        storage=f"sqlite:///{tmp_path}/study.db",
        direction="maximize",
    )
    command = [
        *PROGRAM,
        "dashboard",
        ".",
        "--storage",
        "sqlite:///study.db",
        "--port",
        "0",
        "--json",
    ]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as served:
        assert served.stdout is not None
        url = json.loads(served.stdout.readline())["url"]
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(
            url.replace("/dashboard", "/api/studies"), timeout=20
        ) as answer:
            assert json.load(answer)["study_summaries"][0]["study_name"] == "one"
        served.terminate()
        assert served.wait(timeout=20) == 0


def test_a_predicted_answer_has_no_study(tmp_path: Path) -> None:
    document = json.loads(EXAMPLE.read_text()) | {"study": None, "basis": "predicted"}
    (tmp_path / "recommendation.json").write_text(json.dumps(document))
    done = autotune("dashboard", ".", cwd=tmp_path)
    assert done.code == 2
    assert "autotune report" in done.err

"""The other ways out: 1, 4, and what help looks like."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import autotune, shape_only


def test_an_interpreter_that_is_none_is_4(tmp_path: Path) -> None:
    shape_only(tmp_path / "model")
    done = autotune(
        "run", "--model", "model", "--gpus", "cpu", "--python", "/nowhere/python", cwd=tmp_path
    )
    assert done.code == 4
    assert "--python /nowhere/python" in done.err and "Traceback" not in done.err
    done = autotune(
        "run", "--model", "model", "--gpus", "cpu", "--python", "/bin/false", cwd=tmp_path
    )
    assert done.code == 4
    assert "/bin/false can't be started as a Python interpreter" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_an_environment_without_the_framework_is_4(tmp_path: Path) -> None:
    shape_only(tmp_path / "model")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")],
        check=True,
        timeout=60,
    )
    python = str(tmp_path / "bare" / "bin" / "python")
    done = autotune("run", "--model", "model", "--gpus", "cpu", "--python", python, cwd=tmp_path)
    assert done.code == 4
    assert "has no trl" in done.err and "-m pip install" in done.err
    assert not (tmp_path / "autotune-out").exists()


def test_a_fault_of_ours_is_1_and_keeps_its_traceback(tmp_path: Path) -> None:
    script = (
        "import autotune.catalog, sys\n"
        "def broken(): raise RuntimeError('first line\\nsecond line')\n"
        "autotune.catalog.models = broken\n"
        "from autotune.cli import main; main(['show', 'models'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "Traceback (" not in done.stderr
    assert "internal error of autotune: RuntimeError: first line." in done.stderr
    place = re.search(r"traceback is in (\S+)\.$", done.stderr.strip())
    assert place is not None
    traceback = Path(place[1])
    assert "second line" in traceback.read_text()
    traceback.unlink()


def test_the_details_begin_a_sentence_of_their_own(tmp_path: Path) -> None:
    script = (
        "import autotune.catalog\n"
        "from autotune.core.errors import ProbeError\n"
        "def broken(): raise ProbeError('The worker ended: it printed nothing')\n"
        "autotune.catalog.models = broken\n"
        "from autotune.cli import main; main(['show', 'models'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "it printed nothing. The details are in" in done.stderr


def test_without_a_command_the_help_is_printed(tmp_path: Path) -> None:
    done = autotune(cwd=tmp_path)
    assert done.code == 0 and done.err == ""
    assert done.out == autotune("--help", cwd=tmp_path).out
    assert autotune("--json", cwd=tmp_path).code == 2, "an unknown option is an error all the same"


def test_after_an_interruption_nothing_runs_that_could_take_long(tmp_path: Path) -> None:
    script = (
        "import atexit, time, autotune.catalog\n"
        "atexit.register(time.sleep, 50)\n"
        "def interrupted(): raise KeyboardInterrupt\n"
        "autotune.catalog.models = interrupted\n"
        "from autotune.cli import main; main(['show', 'models'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=40,
    )
    assert (done.returncode, done.stderr.strip()) == (130, "Error: Interrupted.")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run"],
        ["predict"],
        ["show"],
        ["show", "models"],
        ["show", "gpus"],
        ["show", "spaces"],
        ["show", "knobs"],
        ["diagnose"],
        ["preflight"],
    ],
)
def test_every_command_has_help_with_an_example(arguments: list[str], tmp_path: Path) -> None:
    done = autotune(*arguments, "--help", cwd=tmp_path)
    assert done.code == 0
    assert re.search(r"Examples?:\n\s+autotune ", done.out)


def test_only_what_works_is_offered(tmp_path: Path) -> None:
    done = autotune("--help", cwd=tmp_path)
    commands = done.out.split("Commands:")[1]
    assert re.findall(r"^  (\w+)", commands, re.MULTILINE) == [
        "run",
        "predict",
        "solve",
        "rehearse",
        "preflight",
        "guard",
        "diagnose",
        "report",
        "dashboard",
        "study",
        "completion",
        "show",
    ]
    assert "--script" in autotune("run", "--help", cwd=tmp_path).out


@pytest.mark.parametrize("table_name", ["models", "gpus", "spaces", "knobs"])
def test_show_prints_a_table_or_one_document(table_name: str, tmp_path: Path) -> None:
    table = autotune("show", table_name, cwd=tmp_path)
    document = autotune("show", table_name, "--json", cwd=tmp_path)
    assert table.code == document.code == 0
    rows = document.document[table_name]
    assert len(rows) >= 3 and document.document["schema"] == 1
    assert all(row["name"] in table.out for row in rows)
    assert table.err == document.err == ""


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"{sys.executable} -m autotune show models | head -1; exit ${{PIPESTATUS[0]}}",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.stderr == "" and done.stdout.startswith("name") and done.returncode == 0


def test_an_exit_code_does_not_depend_on_the_reader(tmp_path: Path) -> None:
    """Exit code 5, no known failure, with nobody reading the answer: rich and print alike."""
    (tmp_path / "train.log").write_text("nothing that anybody knows\n")
    for flag in ("", "--json"):
        script = (
            f"{sys.executable} -m autotune diagnose train.log {flag} | true; exit"
            " ${PIPESTATUS[0]}"
        )
        done = subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (5, "")

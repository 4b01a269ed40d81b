"""`autotune preflight` as a pipeline meets it: refusals at once, and a command that gets this
very process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli.preflight import PreflightDisplay, names, with_file
from autotune.core.events import JobStarted
from autotune.search.loop import legal_candidates
from tests.cli.command import autotune
from tests.simulated import MIB, ToyTrainer, toy_job, toy_space

CONFIG = "train.yaml"


@pytest.fixture(name="folder")
def a_folder_with_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / CONFIG).write_text("model_name_or_path: model\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("count", [1, 2], ids=["one configuration", "a search"])
def test_a_note_is_shown_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    count: int,
) -> None:
    job = toy_job(tmp_path, toy_space(num_generations=(8,)), 900 * MIB)
    candidates = legal_candidates(job, ToyTrainer())[:count]
    started = JobStarted(
        job=job,
        candidates=candidates,
        assumed=(),
        notes=("half of it is unknown",),
    )
    with PreflightDisplay(to_stderr=True) as display:
        display(started)
    assert capsys.readouterr().err.count("half of it is unknown") == 1


@pytest.mark.parametrize(
    ("arguments", "says", "instead"),
    [
        (["none.yaml"], "none.yaml is no file", "trl grpo --config"),
        (
            [CONFIG, "--", "no-such-program", CONFIG],
            "'no-such-program' is no program",
            "two dashes",
        ),
        ([CONFIG, "--tune", "--", "true"], "does not name train.yaml", "AUTOTUNE_CONFIG"),
        ([CONFIG, "--gpus", "99xcpu", "--", "true", CONFIG], "99 CPU ranks", "at most"),
        ([CONFIG, "--gpus", "8xH100"], "8xH100 is not on this machine", "--gpus cpu"),
    ],
    ids=["no file", "no program", "a tuned file would not arrive", "too many ranks", "not here"],
)
def test_bad_input_is_2_before_anything_is_measured(
    folder: Path,
    arguments: list[str],
    says: str,
    instead: str,
) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    done = autotune("preflight", *arguments, cwd=folder)
    assert done.code == 2, done.err
    assert says in done.err and instead in done.err


def test_an_interpreter_that_is_none_is_4(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    done = autotune(
        "preflight", CONFIG, "--gpus", "cpu", "--python", "/bin/false", "--json", cwd=folder
    )
    assert done.code == 4 and done.document["error"]["exit_code"] == 4


def test_the_tuned_file_replaces_the_configuration(folder: Path) -> None:
    command = [
        "trl",
        "grpo",
        "--config",
        CONFIG,
        f"--again=./{CONFIG}",
        str(folder / CONFIG),
        "--run_name",
        "train",
        "x=train.yaml",
    ]
    use = Path("out/recommended.yaml")
    replaced = with_file(command, CONFIG, use)
    assert replaced == [
        "trl",
        "grpo",
        "--config",
        str(use),
        f"--again={use}",
        str(use),
        "--run_name",
        "train",
        "x=train.yaml",
    ]
    assert with_file(command, CONFIG, Path(CONFIG)) == command, (
        "what fits as it is is named as it was"
    )
    assert not names("", CONFIG) and not names("\0", CONFIG) and not names("--config", CONFIG)


BECOME = """
import sys
from pathlib import Path
from autotune.cli.preflight import become
become([sys.executable, "-c", sys.argv[1], "train.yaml"], Path("out/recommended.yaml"))
"""


def test_the_command_gets_this_process_its_streams_and_its_signals(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, json; print(json.dumps([os.getpid(), sys.argv[1:],"
        " os.environ['AUTOTUNE_CONFIG']])); assert sys.stdin.read() == 'typed'; sys.exit(17)"
    )

    process = subprocess.Popen(
        [sys.executable, "-c", BECOME, program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    out, _ = process.communicate("typed", timeout=60)
    assert process.returncode == 17, "its exit code is ours"
    assert json.loads(out) == [process.pid, ["train.yaml"], "out/recommended.yaml"]


def test_a_command_ends_when_its_reader_does(tmp_path: Path) -> None:

    # Written by `yes`, which knows nothing of a broken pipe but its signal: were it ignored, it
    # would complain and exit with 1.
    code = (
        "from pathlib import Path; from autotune.cli.preflight import become; become(['yes'],"
        " Path('x'))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(100)
    process.stdout.close()
    assert process.wait(timeout=60) == -signal.SIGPIPE and process.stderr.read() == b""
    process.stderr.close()


def test_an_answer_from_the_record_loads_nothing_heavy() -> None:

    code = (
        "import sys, autotune.preflight.check, autotune.cli.preflight;"
        " print(*sorted({n.split('.')[0] for n in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert not {"optuna", "numpy", "sqlalchemy", "torch", "plotly", "jinja2"} & set(
        done.stdout.split()
    )

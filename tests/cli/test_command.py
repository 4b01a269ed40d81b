"""`autotune run --framework command -- ...`: a training command of one's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import Done, autotune

SCRIPT = Path(__file__).resolve().parents[1] / "frameworks" / "scripts" / "plain_torch.py"
SPEED = r"(?P<tokens_per_second>[\d.]+) tok/s"


def run(
    *arguments: str, cwd: Path, command: tuple[str, ...] = (), timeout: float = 60, **variables: str
) -> Done:
    command_line = (
        "run",
        "--framework",
        "command",
        "--gpus",
        "cpu",
        *arguments,
        *(("--", *command) if command else ()),
    )
    return autotune(
        *command_line,
        cwd=cwd,
        timeout=timeout,
        XDG_DATA_HOME=str(cwd / "data"),
        **variables,
    )


TRAIN = (sys.executable, str(SCRIPT), "--bs", "{bs}")


@pytest.mark.parametrize(
    ("arguments", "command", "message"),
    [
        (("--speed-pattern", SPEED), (), "needs a command"),
        (("--search", "bs=1,2"), TRAIN, "--speed-pattern"),
        (
            ("--speed-pattern", SPEED, "--metrics", "m.jsonl", "--search", "bs=1"),
            TRAIN,
            "given once",
        ),
        (("--speed-pattern", "(", "--search", "bs=1"), TRAIN, "not a regular expression"),
        (("--speed-pattern", "tok/s", "--search", "bs=1"), TRAIN, "has no group"),
        (("--speed-pattern", SPEED), TRAIN, "--search bs=1,2,4"),
        (
            ("--speed-pattern", SPEED, "--search", "sb=1", "--hold", "bs=1"),
            TRAIN,
            "it has {bs}. Write {sb}",
        ),
        (("--speed-pattern", SPEED, "--search", "bs=1"), TRAIN[:2], "it has none. Write {bs}"),
        (
            ("--speed-pattern", SPEED, "--search", "bs=1", "--model", "Qwen2.5-7B"),
            TRAIN,
            "--model is for known frameworks",
        ),
        (
            ("--speed-pattern", SPEED, "--search", "bs=1", "--mode", "predict"),
            TRAIN,
            "not predicted",
        ),
    ],
)
def test_missing_arguments_are_reported_with_the_fix(
    arguments: tuple[str, ...],
    command: tuple[str, ...],
    message: str,
    tmp_path: Path,
) -> None:
    done = run(*arguments, cwd=tmp_path, command=command)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err
    assert not (tmp_path / "autotune-out").exists()


def test_a_program_that_is_not_there_is_the_environments_fault(tmp_path: Path) -> None:
    done = run(
        "--speed-pattern",
        SPEED,
        "--search",
        "bs=1",
        cwd=tmp_path,
        command=("no-such-trainer", "{bs}"),
    )
    assert done.code == 4 and "no-such-trainer" in done.err


def test_a_framework_that_is_not_installed_is_named_with_the_line_for_pip(tmp_path: Path) -> None:
    done = autotune(
        "run",
        "--framework",
        "swift",
        "--method",
        "sft",
        "--model",
        "Qwen2.5-0.5B",
        "--gpus",
        "cpu",
        cwd=tmp_path,
    )
    assert done.code == 4 and "pip install 'ms-swift>=" in done.err and "--python" in done.err


def test_a_command_without_its_framework_is_refused(tmp_path: Path) -> None:
    done = autotune("run", "--model", "Qwen2.5-7B", "--", "my-trainer", "--bs", "4", cwd=tmp_path)
    assert done.code == 2 and "--framework command" in done.err


@pytest.mark.slow
def test_a_plain_torch_script_is_tuned_under_a_limit(tmp_path: Path) -> None:
    done = run(
        "--metrics",
        "{out}/log.jsonl",
        "--search",
        "bs=8,64,4096",
        "--memory-limit",
        "500M",
        "--json",
        cwd=tmp_path,
        command=(*TRAIN, "--log", "{out}/log.jsonl"),
        timeout=300,
    )
    assert done.code == 0, done.err
    document = done.document
    assert document["counts"]["out_of_memory"] == 1 and document["counts"]["failed"] == 0
    chosen = document["recommendation"]
    assert chosen["knobs"]["bs"] in (8, 64) and chosen["peak_memory_bytes"] < 500 * 2**20
    assert chosen["tokens_per_second"]["worst"] > 0
    assert document["baseline"]["outcome"] == "ok" and document["baseline"]["knobs"] == {"bs": 8}
    assert _the_script_runs(tmp_path, chosen["knobs"]["bs"])
    assert not (tmp_path / "log.jsonl").exists(), "a probe wrote outside of its own folder"


def _the_script_runs(folder: Path, batch: int) -> bool:
    """The recommended command line, as it was written down, for three steps."""
    script = folder / "autotune-out" / "launch.sh"
    output = folder / "own"
    done = subprocess.run(
        ["bash", str(script), "--steps", "3"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "OUT": str(output), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return f'"tokens": {batch * 64}' in (output / "log.jsonl").read_text()


@pytest.mark.slow
def test_a_command_that_tells_no_speed_is_quoted(tmp_path: Path) -> None:
    training = (*TRAIN, "--steps", "2")
    done = run(
        "--speed-pattern",
        r"(?P<tokens>\d+) TOKENS",
        "--hold",
        "bs=2",
        cwd=tmp_path,
        command=training,
        timeout=120,
    )
    assert done.code == 1
    assert "0 records with a speed" in done.out + done.err


def test_a_command_can_be_measured_and_not_predicted(tmp_path: Path) -> None:
    done = autotune(
        "predict",
        "--framework",
        "command",
        "--gpus",
        "cpu",
        "--",
        "python",
        "train.py",
        "{bs}",
        cwd=tmp_path,
    )
    assert (
        done.code == 2
        and "can be measured, but not predicted" in done.err
        and "autotune run" in done.err
    )


@pytest.mark.slow
def test_the_same_command_again_is_answered_from_the_record(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import pathlib\n"
        "for step in range(30):\n"
        "    print(1000.0 + step, 'tok/s', flush=True)\n"
        "pathlib.Path('written.txt').write_text('by the run')\n"
    )
    command = (sys.executable, "train.py", "--bs", "{bs}", "--api-key=verysecretvalue")
    flags = ("--speed-pattern", SPEED, "--search", "bs=1,2", "--json")
    first = run(
        *flags,
        cwd=tmp_path,
        command=command,
        timeout=300,
    )
    assert first.code == 0, first.err
    second = run(
        *flags,
        cwd=tmp_path,
        command=command,
        timeout=300,
    )
    assert second.document["from_record"] is not None, second.err

    # Only the script to train with has the secret, as the user gave it.
    folders = (tmp_path / "autotune-out", tmp_path / "data")
    with_secret = []
    for folder in folders:
        for file in folder.rglob("*"):
            if file.is_file() and b"verysecretvalue" in file.read_bytes():
                with_secret.append(file.name)
    assert with_secret == ["launch.sh"]
    assert "verysecretvalue" not in first.out + first.err + second.out + second.err

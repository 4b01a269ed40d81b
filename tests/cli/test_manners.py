"""Widths, colours and completion: how the program behaves at a terminal, in a pipe and under a
shell.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import TINY_CONFIG, autotune, environment, shape_only
from tests.cli.pseudo_terminal import lines, terminal_output
from tests.diagnosis.around import FRAMES, sample

COMMANDS = (
    ["--help"],
    ["run", "--help"],
    ["preflight", "--help"],
    ["show", "gpus"],
    ["show", "models"],
    ["diagnose", "train.log"],
)


@pytest.mark.parametrize("columns", [60, 100, 200])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_nothing_is_wider_than_the_terminal(
    arguments: list[str],
    columns: int,
    tmp_path: Path,
) -> None:
    (tmp_path / "train.log").write_text(FRAMES + sample("cuda_out_of_memory.container"))
    shown = lines(terminal_output(*arguments, cwd=tmp_path, columns=columns))
    # A name that is longer than its column is told whole, on a line of its own.
    assert [line for line in shown if len(line) > columns and " " in line.strip()] == []
    assert len(shown) > 5


@pytest.mark.parametrize("columns", [60, 200])
def test_errors_are_wrapped_to_the_terminal(columns: int, tmp_path: Path) -> None:
    shown = lines(terminal_output("run", "--model", "no-such-model", cwd=tmp_path, columns=columns))
    assert shown and [line for line in shown if len(line) > columns] == []


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 200])
def test_a_prediction_is_as_wide_as_the_terminal_and_no_wider(columns: int, tmp_path: Path) -> None:
    arguments = (
        "predict",
        "--model",
        str(shape_only(tmp_path / "m")),
        "--gpus",
        "A100-40G",
        "--tuning",
        "full",
    )
    shown = lines(terminal_output(*arguments, cwd=tmp_path, columns=columns))
    assert any("by phase" in line for line in shown), shown
    assert [line for line in shown if len(line) > columns and not line.startswith("grpo of")] == []


def test_no_colour_in_a_pipe_nor_where_none_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(FRAMES + sample("disk"))
    for arguments in COMMANDS:
        assert "\x1b" not in autotune(*arguments, cwd=tmp_path, FORCE_COLOR="").out
        assert "\x1b[3" not in terminal_output(
            *arguments,
            cwd=tmp_path,
            columns=100,
            NO_COLOR="1",
        )


def _completed(typed: str, tmp_path: Path) -> list[str]:
    """Return bash's completions for these words: the script is sourced and its function called."""
    script = autotune("completion", "bash", cwd=tmp_path)
    assert script.code == 0, script.err
    (tmp_path / "autotune.bash").write_text(script.out)
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "autotune").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m autotune "$@"\n')
    (programs / "autotune").chmod(0o755)
    words_typed = typed.split(" ")
    asking = (
        "source autotune.bash\n"
        f"COMP_WORDS=({' '.join(words_typed)}); [ -n '{words_typed[-1]}' ] || COMP_WORDS+=('')\n"
        f"COMP_CWORD={len(words_typed) - 1}\n"
        "complete -p autotune >&2\n"
        '_autotune_completion autotune "${COMP_WORDS[COMP_CWORD]}" ""\n'
        "printf '%s\\n' \"${COMPREPLY[@]}\"\n"
    )
    variables = environment(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run(
        ["bash", "-c", asking],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "_autotune_completion" in done.stderr, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash is installed")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("autotune pre", {"predict", "preflight"}),
        ("autotune run --gpus A100", {"A100-40G", "A100-80G"}),
        ("autotune predict --model Qwen2.5-0", {"Qwen2.5-0.5B"}),
        ("autotune show ", {"models", "gpus", "spaces", "knobs"}),
        ("autotune run --tuning q", {"qlora"}),
    ],
)
def test_bash_completes(
    typed: str,
    offered: set[str],
    tmp_path: Path,
) -> None:
    assert offered <= set(_completed(typed, tmp_path))


@pytest.mark.parametrize(
    ("shell", "check"), [("zsh", ["zsh", "-n"]), ("fish", ["fish", "--no-execute"])]
)
def test_other_shells_get_a_script_of_theirs(
    shell: str,
    check: list[str],
    tmp_path: Path,
) -> None:
    done = autotune("completion", shell, cwd=tmp_path)
    assert done.code == 0 and "_AUTOTUNE_COMPLETE" in done.out and "autotune" in done.out
    if shutil.which(check[0]) is None:
        assert {"zsh": "#compdef autotune", "fish": "complete --no-files --command autotune"}[
            shell
        ] in done.out
        return
    (tmp_path / "script").write_text(done.out)
    subprocess.run(
        [*check, "script"],
        cwd=tmp_path,
        check=True,
        timeout=60,
    )


def test_pages_go_into_a_folder_and_into_nothing_else(tmp_path: Path) -> None:
    for wrong in ([], ["--help"], ["a", "b"]):
        done = subprocess.run(
            [sys.executable, "-m", "autotune.cli.reference_pages", *wrong],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0 and "usage" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_answer_is_shown_in_an_encoding_that_lacks_its_characters(tmp_path: Path) -> None:
    folder = tmp_path / "modèle"
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps(TINY_CONFIG))
    answer = autotune(
        "predict",
        "--model",
        str(folder),
        "--gpus",
        "1xA100-40G",
        cwd=tmp_path,
        timeout=300,
        PYTHONIOENCODING="ascii",
    )
    assert answer.code == 0, answer.err
    assert "mod?le" in answer.out

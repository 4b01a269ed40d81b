"""Terminal output of a job: lines wrapped at a terminal, and progress."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from autotune.core.events import Note
from autotune.report.job_text import Progress, print_line
from tests.cli.pseudo_terminal import watched
from tests.report.answers import answered

WORDS = (
    "num_generations=8, max_prompt_length=64, beta=0.0, loss_type=dapo, optim=adamw_torch_fused,"
    " vllm_max_model_length=320"
)


def printed(
    text: str,
    width: int,
    *,
    soft: bool = False,
) -> list[str]:
    page = io.StringIO()
    print_line(
        Console(
            file=page,
            width=width,
            markup=False,
            highlight=False,
            soft_wrap=soft,
        ),
        text,
    )
    return page.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize(
    ("before", "under"), [("held     ", 9), ("settings ", 9), ("  ", 6), ("", 4)]
)
def test_continuation_lines_are_below_the_text(
    before: str,
    under: int,
    width: int,
) -> None:
    first, *continuation = printed(before + WORDS, width)
    assert first.startswith(f"{before}num_generations=8") and continuation
    assert all(line.startswith(" " * under) and line[under] != " " for line in continuation)
    assert max(map(len, (first, *continuation))) <= width
    assert " ".join([first.removeprefix(before), *(line.strip() for line in continuation)]) == WORDS


def test_a_word_longer_than_the_terminal_is_cut_rather_than_lost() -> None:
    lines = printed("out      /" + "x" * 100, 60)
    assert max(map(len, lines)) <= 60 and "".join(line.strip() for line in lines).count("x") == 100


def test_a_pipe_gets_the_line_as_it_is() -> None:
    assert printed("held     " + WORDS, 60, soft=True) == ["held     " + WORDS]


def test_plain_lines_where_there_is_no_terminal() -> None:
    case = answered(450)
    page = io.StringIO()
    with Progress(case.job.space, stream=page) as progress:
        for event in [*case.events, Note(text="one [bold]sentence[/bold]")]:
            progress(event)
    lines = page.getvalue().splitlines()
    assert "\x1b" not in page.getvalue()
    assert lines[0].startswith(
        f"{case.answer.counts.candidates} candidates; at most 100 probes in 10 min 00 s"
    )
    assert lines[1].startswith("probe 1 (baseline, loading first): batch=8 checkpointing=true")
    assert lines[1].endswith("left]")
    assert any("  fits: " in line and "tokens/s" in line for line in lines)
    assert any("  oom_backward, peak 450 MiB" in line for line in lines)
    assert lines[-1] == "one [bold]sentence[/bold]", "text is shown as it is"


SHOW = (Path(__file__).parent / "programs/show_progress.py.txt").read_text()


def _on_a_terminal(**variables: str) -> str:
    """Return the program's stderr on a real pseudo-terminal."""
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLUMNS": "100",
        "PYTHONPATH": root,
        **variables,
    }
    environment.pop("NO_COLOR", None) if "NO_COLOR" not in variables else None
    output, code = watched(
        [sys.executable, "-c", SHOW], ("stderr",), stdout=subprocess.DEVNULL, env=environment
    )
    assert code == 0
    return output


def test_a_live_line_on_a_terminal() -> None:
    output = _on_a_terminal()
    assert "\x1b[" in output, "a live display moves the cursor"
    assert "probe 1 (anchor" in output and " left" in output
    assert "fits: " in output and "best so far" in output


def test_no_live_display_on_a_dumb_terminal() -> None:
    assert "\x1b[" not in _on_a_terminal(TERM="dumb")


def test_no_color_means_no_color() -> None:
    import re

    output = _on_a_terminal(NO_COLOR="1")
    colours = [
        code for code in re.findall(r"\x1b\[([0-9;]*)m", output) if code not in ("", "0", "1", "2")
    ]
    assert colours == []

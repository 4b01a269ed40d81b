"""Continuation lines are indented below the text at every width; a pipe gets whole lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from autotune.report.job_text import print_line

WORDS = "num_generations=8, max_prompt_length=64, beta=0.0, loss_type=dapo, optim=adamw_torch_fused, vllm_max_model_length=320"


def told(text: str, width: int, *, soft: bool = False) -> list[str]:
    page = io.StringIO()
    print_line(Console(file=page, width=width, markup=False, highlight=False, soft_wrap=soft), text)
    return page.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize(("before", "under"), [("held     ", 9), ("settings ", 9), ("  ", 6), ("", 4)])
def test_continuation_lines_are_below_the_text(before: str, under: int, width: int) -> None:
    first, *others = told(before + WORDS, width)
    assert first.startswith(f"{before}num_generations=8") and others
    assert all(line.startswith(" " * under) and line[under] != " " for line in others)
    assert max(map(len, (first, *others))) <= width
    assert " ".join([first.removeprefix(before), *(line.strip() for line in others)]) == WORDS


def test_a_word_longer_than_the_terminal_is_cut_rather_than_lost() -> None:
    lines = told("out      /" + "x" * 100, 60)
    assert max(map(len, lines)) <= 60 and "".join(line.strip() for line in lines).count("x") == 100


def test_a_pipe_gets_the_line_as_it_is() -> None:
    assert told("held     " + WORDS, 60, soft=True) == ["held     " + WORDS]

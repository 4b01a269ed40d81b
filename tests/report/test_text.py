from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from autotune.report.job_text import show_job
from autotune.report.terminal import show_answer
from autotune.search.loop import legal_candidates
from tests.report.answers import Answered, answered
from tests.report.test_forecast import WAY
from tests.simulated import MIB, ToyTrainer, toy_job, toy_space


def _console() -> tuple[Console, io.StringIO]:
    page = io.StringIO()
    return Console(
        file=page,
        width=160,
        markup=False,
        highlight=False,
    ), page


def _shown(case: Answered) -> str:
    console, page = _console()
    show_answer(console, case.job, case.answer, ["out/recommended.yaml"])
    return page.getvalue()


def test_the_job_is_described_before_the_search(tmp_path: Path) -> None:
    job = toy_job(tmp_path, toy_space(num_generations=(8,)), 900 * MIB)
    console, page = _console()
    candidates = legal_candidates(job, ToyTrainer())
    show_job(
        console,
        job,
        candidates,
        assumed=["LoRA of rank 16", "global batch 64"],
        notes=["vLLM is not installed there"],
    )
    text = page.getvalue()
    assert "grpo of toy (made up) with trl, on cpu" in text
    assert "assumed  LoRA of rank 16, global batch 64" in text
    assert "held     num_generations=8" in text
    learning, neutral = text.split("changes what is learned\n")[1].split(
        "changes only speed and memory\n"
    )
    assert "max_completion_length: 64, 32" in learning and "batch" not in learning
    assert "batch: 1, 2, 4, 8" in neutral and "checkpointing: true, false" in neutral
    assert "note     vLLM is not installed there" in text


def test_the_answer_has_values_reasons_and_evidence() -> None:
    text = _shown(answered(900))
    for part in (
        "baseline",
        "recommended",
        "peak memory",
        "changed",
        "learning?",
        "engine",
        "Runner-ups",
        "Confirmed by",
    ):
        assert part in text, part
    assert "enforced by formula" in text
    assert "completions of the longest length only" in text
    assert "Written: out/recommended.yaml" in text
    assert "Result: no better candidate possible." in text
    assert "± 1 %" in text, "a speed comes with its interval, though its cycles are equal"
    assert "Measurably faster: " in text
    assert "forward" in text and "100 %" in text


def test_a_baseline_that_the_budget_left_no_time_for_is_not_called_illegal() -> None:
    case = answered(900)
    change = case.answer.changes[0]
    text = _shown(replace(case, answer=replace(case.answer, baseline=None)))
    assert "not measured" in text and "not legal" not in text
    shown = next(line.split() for line in text.splitlines() if line.split()[:1] == [change.name])
    assert shown[1] == str(change.baseline).lower(), "what it is, is known without measuring it"


def test_a_relaxed_learning_knob_is_first() -> None:
    case = answered(200)
    assert case.answer.relaxed
    first = _shown(case).splitlines()[:2]
    assert "Relaxed, which changes what is learned" in first[0]
    assert all(f"{name}={value}" in first[1] for name, value in case.answer.relaxed.items())


def test_nothing_fits_tells_how_close_it_came() -> None:
    text = _shown(answered(100))
    assert text.startswith("Nothing fits into 100 MiB.")
    assert "Nearest miss: batch=" in text
    assert "Given up without success: num_generations (tried 8, 4)" in text
    assert "--memory-limit" in text and "--search num_generations" in text
    assert "recommended" not in text


def test_predicted_changes_of_the_baseline_follow_where_nothing_fits() -> None:
    case = answered(100)
    assert "changes that make the baseline fit" not in _shown(case)
    text = _shown(replace(case, answer=replace(case.answer, ways_to_fit=(WAY,))))
    assert (
        "Predicted changes that make the baseline fit, the cheapest first:\n  --hold batch=4\n"
        in text
    )


def test_a_larger_budget_is_suggested_only_if_candidates_are_undecided() -> None:
    case = answered(100)
    counts = replace(
        case.answer.counts,
        probed=3,
        implied=3,
        screened=4,
    )
    text_by_count = {
        candidates: _shown(
            replace(
                case,
                answer=replace(
                    case.answer,
                    proven="not proven infeasible",
                    counts=replace(counts, candidates=candidates),
                ),
            )
        )
        for candidates in (10, 11)
    }
    assert "larger --budget" in text_by_count[11]
    assert (
        "larger --budget" not in text_by_count[10] and "raise --memory-limit" in text_by_count[10]
    )


def test_failures_are_not_called_a_lack_of_memory() -> None:
    text = _shown(answered(900, everything_crashes=True))
    assert text.startswith("Every probe failed, and none for lack of memory")
    assert "Nothing fits" not in text


def test_trade_offs_are_offered_only_where_they_were_measured() -> None:
    for limit in (200, 450, 900):
        case = answered(limit)
        assert ("offered and not taken" in _shown(case)) == bool(case.answer.trade_offs)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("limit", [100, 200, 900])
def test_nothing_is_wider_than_the_terminal(
    limit: int,
    width: int,
    tmp_path: Path,
) -> None:
    case, page = answered(limit), io.StringIO()
    console = Console(
        file=page,
        width=width,
        markup=False,
        highlight=False,
    )
    job = toy_job(tmp_path, toy_space(), limit * MIB)
    assumed = [
        "full fine-tuning",
        "global batch 16",
        "random weights",
        "synthetic prompts of the longest length",
    ]
    show_job(console, job, legal_candidates(job, ToyTrainer()), assumed=assumed, notes=["n " * 90])
    show_answer(
        console,
        case.job,
        case.answer,
        ["out/recommended.yaml", "out/accelerate.yaml", "out/launch.sh"],
    )
    lines = page.getvalue().splitlines()
    assert len(lines) > 10 and [line for line in lines if len(line.rstrip()) > width] == []

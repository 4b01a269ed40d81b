"""Texts about one probe, one candidate or one measurement have the singular."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from autotune.core.answer import Recommendation
from autotune.core.events import CandidatesPruned, Event
from autotune.core.measurement import Outcome
from autotune.report.job_text import Progress
from autotune.report.output_folder import head_lines
from autotune.report.terminal import show_answer
from tests.report.answers import Answered, answered


def _shown(case: Answered, answer: Recommendation) -> str:
    page = io.StringIO()
    console = Console(
        file=page,
        width=200,
        markup=False,
        highlight=False,
    )
    show_answer(console, case.job, answer, [])
    return page.getvalue()


def _printed(case: Answered, event: Event) -> str:
    page = io.StringIO()
    with Progress(case.job.space, stream=page) as progress:
        progress(event)
    return page.getvalue()


@pytest.mark.parametrize(
    ("probed", "candidates", "sentence"),
    [(1, 1, "1 probe of 1 candidate in"), (2, 8, "2 probes of 8 candidates in")],
)
def test_the_answer_counts_probes_and_candidates(
    probed: int,
    candidates: int,
    sentence: str,
) -> None:
    case = answered(900)
    counts = replace(case.answer.counts, probed=probed, candidates=candidates)
    assert sentence in _shown(case, replace(case.answer, counts=counts))


def test_one_crash_among_the_probes_is_one_probe() -> None:
    case = answered(50)
    first, *later = case.answer.trials
    crash = replace(first, measurement=replace(first.measurement, outcome=Outcome.CRASH))
    answer = replace(case.answer, trials=(crash, *later))
    assert "1 probe crashed, which" in _shown(case, answer)


@pytest.mark.parametrize(
    ("probed", "beginning"),
    [(1, "BEST SO FAR, after 1 probe:"), (2, "BEST SO FAR, after 2 probes:")],
)
def test_the_best_so_far_counts_the_probes(probed: int, beginning: str) -> None:
    case = answered(900)
    counts = replace(case.answer.counts, probed=probed)
    answer = replace(
        case.answer,
        counts=counts,
        certificate=None,
        interrupted=True,
    )
    assert head_lines(case.job, answer)[0].startswith(beginning)


def test_the_progress_counts_candidates_and_probes() -> None:
    case = answered(900)
    event = CandidatesPruned(
        candidates=1,
        resumed_trials=0,
        max_probes=1,
        budget_seconds=60.0,
    )
    assert "1 candidate; at most 1 probe in" in _printed(case, event)

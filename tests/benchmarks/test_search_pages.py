"""Pages of the search benchmark: written of the stored studies, and of complete seeds only."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from search import RESULTS, stored_studies  # noqa: E402
from search_pages import HELD_OUT, STEMS, complete_seeds, document_of  # noqa: E402
from search_report import markdown  # noqa: E402


@pytest.mark.parametrize("kind", STEMS)
def test_the_committed_page_is_that_of_the_stored_studies(kind: str) -> None:
    page = (RESULTS / f"{STEMS[kind]}.md").read_text()
    assert page == markdown(document_of(kind))


def test_a_seed_without_all_studies_is_left_out() -> None:
    results = stored_studies(HELD_OUT / "worse.jsonl")
    seeds = {result.seed for result in complete_seeds(results)}
    left_out = complete_seeds(results)[0]
    without_one = [result for result in results if result is not left_out]
    assert {result.seed for result in complete_seeds(without_one)} == seeds - {left_out.seed}


def test_other_searchers_are_not_on_the_page() -> None:
    results = stored_studies(HELD_OUT / "worse.jsonl")
    ablation = replace(results[0], searcher="TPE, with our screen")
    assert ablation not in complete_seeds([*results, ablation])

"""The committed result of `make mutants`: the page agrees with its JSON, and each survivor has a
reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.page import NOTICED, page

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
ROOMS = {"estimate", "search", "probe", "preflight", "request", "frameworks/trl"}


@pytest.fixture(scope="module")
def result() -> Any:
    return json.loads((RESULTS / "mutants.json").read_text())


def test_the_page_says_what_the_file_says(result: Any) -> None:
    text = (RESULTS / "mutants.md").read_text()
    rows = result["mutants"]
    noticed = [row for row in rows if row["outcome"] in ("noticed", "too slow")]
    share = 100 * len(noticed) / len(rows)
    assert text == page(result)
    assert f"{result['number']} small wrong changes" in text
    assert f"seed {result['seed']}" in text
    assert f"{len(rows)} of them are judged" in text
    is_first = all(row["reading"] == 1 for row in rows)
    reading = "First" if is_first else "Second"
    assert f"{reading} reading: {len(noticed)} of {len(rows)} ({share:.1f}%)" in text
    verdict = "met" if len(rows) >= 300 and share >= 85 else "not met"
    assert f"at least 300: {verdict}." in text


def test_at_least_300_are_chosen_and_none_is_judged_twice(result: Any) -> None:
    keys = [row["key"] for row in result["mutants"]]
    assert len(set(keys)) == len(keys) <= result["number"]
    assert result["number"] >= 300
    folders = {row["file"].removeprefix("autotune/") for row in result["mutants"]}
    for room in ROOMS:
        assert any(folder.startswith(f"{room}/") for folder in folders), room


def test_each_survivor_has_a_reason(result: Any) -> None:
    for row in result["mutants"]:
        if row["outcome"] not in NOTICED:
            assert row["reason"], row["key"]


def test_a_noticed_mutant_names_the_test(result: Any) -> None:
    root = RESULTS.parent.parent
    for row in result["mutants"]:
        if row["outcome"] == "noticed":
            assert (root / row["test"].partition("::")[0]).is_file(), row["test"]

"""The benchmark of public recipes: its list, and the table that docs/frameworks.md shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from recipes import RESULTS, ROOT, recipes, table


def test_the_list_has_the_recipes_that_people_start_with() -> None:
    everyone = list(recipes())
    assert len({recipe.name for recipe in everyone}) == len(everyone) >= 10
    by_framework = [recipe.framework for recipe in everyone]
    assert by_framework.count("verl") >= 3 and by_framework.count("swift") >= 3
    methods = set()
    for recipe in everyone:
        if recipe.framework == "trl":
            methods.add(recipe.method)
    assert methods == {"grpo", "sft", "dpo"}


def test_the_page_shows_the_committed_results() -> None:
    stored = json.loads(RESULTS.read_text())
    assert table(stored) in (ROOT / "docs" / "frameworks.md").read_text()
    assert {row["name"] for row in stored["rows"]} <= {recipe.name for recipe in recipes()}


def test_a_row_has_one_of_three_answers() -> None:
    """Predicted with an interval, refused with a reason, or not ended in time; probes name an
    outcome.
    """
    for row in json.loads(RESULTS.read_text())["rows"]:
        prediction = row["predicted"]
        assert (
            prediction["error"]
            or prediction["peak_memory_bytes"]["low"] <= prediction["peak_memory_bytes"]["value"]
        ), row["name"]
        assert row["probed"] is None or "outcome" in row["probed"], row["name"]

"""docs/predictions.md says what the emulated rows of ms-swift show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autotune.core.units import GIB

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "emulated_lengths.json"


ROWS = json.loads(RESULTS.read_text())["rows"]
PROMPT_TOKENS = 102
"""Of a synthetic row in ms-swift's template: it has no logits (`use_logits_to_keep`)."""


def parts_at_peak(row: dict[str, Any]) -> dict[str, int]:
    phases = {phase["name"]: phase["parts"] for phase in row["predicted"]["phases"]}
    parts: dict[str, int] = phases["backward"]
    return parts


def test_every_row_is_inside_its_interval() -> None:
    for name, row in ROWS.items():
        assert row["exit_code"] == 0 and row["steps"] >= 3
        predicted = row["predicted"]["torch_peak_allocated_bytes"]
        for process in row["emulated"]["processes"]:
            allocated = process["torch_allocated_bytes"]
            assert predicted["low"] <= allocated <= predicted["high"], name
            reserved = row["predicted"]["torch_peak_reserved_bytes"]
            assert reserved["low"] <= process["torch_reserved_bytes"] <= reserved["high"], name


def test_without_logits_of_the_prompt_every_row_is_as_predicted() -> None:
    for name, row in ROWS.items():
        predicted = row["predicted"]["torch_peak_allocated_bytes"]["value"]
        tokens = row["setup"]["settings"]["max_length"]
        of_prompt = parts_at_peak(row)["logits"] * PROMPT_TOKENS / tokens
        allocated = row["emulated"]["processes"][0]["torch_allocated_bytes"]
        assert abs((predicted - of_prompt) / allocated - 1) < 0.001, name


def test_the_page_states_the_committed_differences() -> None:
    differences = []
    for row in ROWS.values():
        predicted = row["predicted"]["torch_peak_allocated_bytes"]["value"]
        differences.append(predicted / row["emulated"]["processes"][0]["torch_allocated_bytes"] - 1)
    page = " ".join((ROOT / "docs" / "predictions.md").read_text().split())
    assert f"are predicted {min(differences):.1%} to {max(differences):.1%} too high" in page
    longest = ROWS["swift sft lora, 1 x 30000, recomputed"]["predicted"]
    interval = longest["torch_peak_allocated_bytes"]
    assert f"has {interval['low'] / GIB:.0f} to {interval['high'] / GIB:.0f} GiB" in page

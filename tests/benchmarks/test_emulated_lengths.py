"""docs/predictions.md says what the emulated rows of ms-swift show."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "emulated_lengths.json"


def test_the_page_states_the_committed_differences() -> None:
    differences = {}
    for name, row in json.loads(RESULTS.read_text())["rows"].items():
        assert row["exit_code"] == 0 and row["steps"] >= 3
        predicted = row["predicted"]["torch_peak_allocated_bytes"]["value"]
        process = row["emulated"]["processes"][0]
        differences[name] = predicted / process["torch_allocated_bytes"] - 1
    eight_rows = differences.pop("swift sft full, 8 x 1000, recomputed")
    low, high = min(differences.values()), max(differences.values())
    page = " ".join((ROOT / "docs" / "predictions.md").read_text().split())
    assert f"predicted {low:.1%} to {high:.1%} too high for rows" in page
    assert f"{eight_rows:.1%} too high for eight rows" in page

"""The page that bench-scale writes of its results."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "scale_page.py"
MACHINE = {
    "date": "2026-01-02",
    "cpu": "CPU",
    "cores": 2,
    "commit": "1a2b3c4",
    "memory_bytes": 2**34,
    "system": "Linux",
    "versions": {"ray": "2.60"},
}


def _page(results: dict[str, Any]) -> str:
    spec = importlib.util.spec_from_file_location("scale_page", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.page(results))


def test_every_figure_stands_beside_its_machine() -> None:
    part = {
        "machine": MACHINE,
        "load_average_before": 0.3,
        "rows": [{"slots": 1, "of_the_ideal": 0.96}, {"slots": 2}],
    }
    memory = {**part, "rows": [{"trials": 5000, "resident_mib": {"500": 90.5, "1000": 90.6}}]}
    text = _page({"sleeping": part, "memory": memory})
    assert "| slots | of the ideal |\n|---|---|\n| 1 | 0.96 |\n| 2 |  |" in text
    assert "| 5000 | 500: 90.5, 1000: 90.6 |" in text
    assert (
        text.count(
            "2026-01-02, 2 cores (CPU), 16 GiB, Linux; ray 2.60; load average 0.3 before; commit"
            " 1a2b3c4."
        )
        == 2
    )
    assert "## driver" not in text

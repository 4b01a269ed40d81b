"""`make bench-gpu` with a tiny model on the CPU: the very code that runs on a GPU, in minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
ROOT = Path(__file__).resolve().parents[2]
MINUTES = "2.5"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def bench(out: Path, *arguments: str) -> None:
    command = [
        sys.executable,
        "benchmarks/gpu.py",
        "--device",
        "cpu",
        "--tiny",
        "--out",
        str(out),
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def read(out: Path, part: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "cpu" / f"{part}.json").read_text())
    assert set(document) >= {
        "about",
        "config",
        "gpu",
        "machine",
        "counts",
        "found",
        "seconds_spent",
        "rows",
    }
    assert document["machine"]["date"]
    return document


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    bench(folder, "--parts", "transformers", "--minutes", MINUTES)
    return folder


def test_points_and_real_out_of_memory_errors_are_there(out: Path) -> None:
    document = read(out, "transformers")
    assert document["counts"]["points"] >= 6
    assert document["counts"]["out_of_memory"] >= 1
    for row in document["rows"]:
        measured = row["measurement"]
        assert row["outcome"] == measured["outcome"]
        assert row["fits"] == (row["outcome"] == "ok" and row["peak_bytes"] <= row["limit_bytes"])
        assert (row["tokens_per_second"] is not None) == (row["outcome"] == "ok")
        assert measured["cost"]["total_seconds"] > 0
    assert document["machine"]["versions"]["trl"]


def rows_by_key(out: Path) -> dict[str, Any]:
    return {row["key"]: row for row in read(out, "transformers")["rows"]}


def test_a_cpu_has_no_predictions_and_says_why(out: Path) -> None:
    document = read(out, "transformers")
    refused = 0
    for row in document["rows"]:
        if row["predicted_why_not"] != "not predicted yet":
            assert row["predicted"] is None and "CPU" in row["predicted_why_not"]
            refused += 1
    assert refused


def test_a_ladder_stops_at_its_first_failure(out: Path) -> None:
    climbs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in read(out, "transformers")["rows"]:
        names = ("gradient_checkpointing", "max_completion_length")
        climbs.setdefault((row["setup"], *(row["knobs"].get(name) for name in names)), []).append(
            row
        )
    for climb in climbs.values():
        sizes = [row["knobs"]["per_device_train_batch_size"] for row in climb]
        assert sizes == sorted(sizes)
        for row in climb[:-1]:
            assert not row["outcome"].startswith("oom_")


def test_started_again_it_measures_nothing_twice(out: Path) -> None:
    before = rows_by_key(out)
    bench(out, "--parts", "transformers", "--minutes", "0.01")
    after = rows_by_key(out)
    assert after == before


@pytest.mark.long
def test_the_search_is_held_against_defaults_and_bisection(tmp_path: Path) -> None:
    bench(tmp_path, "--parts", "search", "--minutes", "4")
    comparison = read(tmp_path, "search")["found"]
    assert comparison["autotune run"]["status"] == "ok", comparison["autotune run"]
    assert comparison["by hand"]["probes"] >= 2
    assert comparison["compared"]["over_by_hand"] is not None
    assert comparison["compared"]["gpu_minutes"] > 0


def test_quantised_weights_are_measured_or_refused_with_a_reason(tmp_path: Path) -> None:
    bench(tmp_path, "--parts", "quantised", "--minutes", "1")
    rows = read(tmp_path, "quantised")["rows"]
    assert rows
    for row in rows:
        assert row["why"]

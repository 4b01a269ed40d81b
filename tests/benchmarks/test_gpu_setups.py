"""Setups of `make bench-gpu`, and what its program does where one of them, the GPU or its tools
are missing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from gpu_points import Box, job_of, key_of, measure_setups, rungs_of  # noqa: E402
from gpu_record import Record, unstarted_row  # noqa: E402
from gpu_search import QUESTION  # noqa: E402
from gpu_setups import SETUPS, TRANSFORMERS  # noqa: E402

ALL_SETUPS = [QUESTION, *(setup for part in SETUPS.values() for setup in part)]


@pytest.mark.parametrize("gpus", ["A100-40G", "H100", "H200"])
def test_every_setup_can_be_built_on_every_card(gpus: str) -> None:
    """Drivers report 79.6 GiB for an H100 of 80 GB, so that a limit of 80 GiB is none."""
    for setup in ALL_SETUPS:
        job = job_of(setup, gpus, mode="predict").job
        assert 0 < job.memory_limit_bytes <= job.task.hardware.memory_bytes


def test_a_setup_that_cannot_be_built_is_a_row_and_the_next_one_follows(tmp_path: Path) -> None:
    record = Record(tmp_path / "part.json", about="", config={}, gpu={})
    too_large = replace(TRANSFORMERS[0], limit="900T")
    unknown = replace(TRANSFORMERS[0], holds=("no_such_knob=1",))
    measure_setups([too_large, unknown], "cpu", record, Box(minutes=1))

    rows = json.loads((tmp_path / "part.json").read_text())["rows"]
    assert [row["outcome"] for row in rows] == ["failed to start", "failed to start"]
    assert "900T" in rows[0]["why"] and "no_such_knob" in rows[1]["why"]


def measured_elsewhere(folder: Path) -> dict[str, object]:
    """Write the file of a part of which another machine measured the first point."""
    setup = TRANSFORMERS[0]
    request = job_of(setup, "H100", mode="predict")
    candidate = rungs_of(setup, setup.ladders[0], request)[0]
    row = unstarted_row(key_of(setup, candidate), setup.name, "", candidate.knobs)
    document = {
        "about": "peaks",
        "config": {"minutes": 25.0},
        "gpu": {"name": "h100-80gb-hbm3", "says": "NVIDIA H100 80GB HBM3, 81559 MiB"},
        "machine": {"cpu": "that of the GPU's machine", "versions": {"trl": "1.16.0"}},
        "seconds_spent": 1500.0,
        "rows": [{**row, "outcome": "ok", "fits": True}],
    }
    folder.mkdir()
    (folder / "transformers.json").write_text(json.dumps(document))
    return document


def only_predict(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `gpu.py --only-predict` where neither nvidia-smi nor git can be found."""
    return subprocess.run(
        [
            sys.executable,
            BENCHMARKS / "gpu.py",
            "--only-predict",
            "--parts=transformers",
            f"--out={out}",
            *arguments,
        ],
        env={"PATH": "/nowhere", "PYTHONPATH": str(BENCHMARKS.parent), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_predicting_needs_neither_a_gpu_nor_its_tools(tmp_path: Path) -> None:
    before = measured_elsewhere(tmp_path / "h100-80gb-hbm3")
    result = only_predict(tmp_path, "--gpu=h100-80gb-hbm3")
    assert result.returncode == 0, result.stderr
    after = json.loads((tmp_path / "h100-80gb-hbm3" / "transformers.json").read_text())
    predicted = after["rows"][0]["predicted"]
    # Half a billion parameters of two bytes, on a card of which 20 % are allowed.
    assert 2**30 < predicted["peak_memory_bytes"]["value"] < 0.2 * 80 * 2**30
    for name in ("config", "gpu", "machine", "seconds_spent"):
        assert after[name] == before[name]  # the measurements are those of the other machine


def test_predicting_for_no_card_names_the_flag(tmp_path: Path) -> None:
    result = only_predict(tmp_path)
    assert result.returncode == 2
    assert "--gpu" in result.stderr and "Traceback" not in result.stderr

"""GRPO of launched frameworks by their own code, with vLLM, on two emulated cards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.estimate.engine_passes import outside_torch_bytes

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = Path(os.environ.get("AUTOTUNE_CUDA_FRAMEWORKS", ROOT / ".venvs"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("framework", ["swift", "verl"])
def test_real_steps_stay_within_the_prediction(framework: str, tmp_path: Path) -> None:
    if not (ENVIRONMENTS / f"cuda-{framework}/bin/python").exists():
        pytest.skip(f"no {ENVIRONMENTS}/cuda-{framework}: make cuda-frameworks")
    arguments = [
        "benchmarks/emulated_frameworks.py",
        "--environments",
        str(ENVIRONMENTS),
        "--out",
        str(tmp_path / "found.json"),
        framework,
    ]
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    row = json.loads((tmp_path / "found.json").read_text())["rows"][framework]
    assert row["steps"] >= 3
    processes = row["emulated"]["processes"]
    assert {process["card"] for process in processes} == {0, 1}
    assert all(
        process["role"] is not None or process["rank"] is not None for process in processes
    ), processes
    phases = {phase for process in processes for phase in process["phase_peak_bytes"]}
    assert {"engine start", "rollout", "backward", "optimizer"} <= phases
    predicted = row["predicted"]["peak_memory_bytes"]
    for peak in row["emulated"]["cards"].values():
        assert predicted["low"] <= peak <= predicted["high"]
    allocated = row["predicted"]["torch_peak_allocated_bytes"]
    trainers = [process for process in processes if "backward" in process["phase_peak_bytes"]]
    assert trainers
    for trainer in trainers:
        # The emulated driver has nothing of what vLLM holds outside torch: the cache of an engine
        # in this process takes it.
        outside = (
            outside_torch_bytes(1, beside_trainer=True).value
            if "engine start" in trainer["phase_peak_bytes"]
            else 0
        )
        assert allocated["low"] <= trainer["torch_allocated_bytes"] - outside <= allocated["high"]

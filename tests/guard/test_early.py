"""--early with the real TRL on a CPU: rows get longer, so the peak grows and would reach the limit
of the machine long before the end. The run is saved and goes on with a smaller micro-batch.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.guard.test_same_learning import run_in
from tests.pipeline import make_project

pytestmark = pytest.mark.slow

STEPS = 1_000_000
STEPS_AFTER_THE_RESTART = 3
SCRIPT = f"""
import sys

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from autotune.integrations.trl import MemoryWatch

micro, accumulate = int(sys.argv[1]), int(sys.argv[2])
checkpoint = sys.argv[3] if len(sys.argv) > 3 else None
steps = {STEPS}
if checkpoint is not None:
    steps = int(checkpoint.rsplit("-", 1)[1]) + {STEPS_AFTER_THE_RESTART}
rows = [{{"text": "one plus two " * (2 + row // 4)}} for row in range(4000)]
arguments = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=micro,
    gradient_accumulation_steps=accumulate,
    max_steps=steps,
    max_length=None,
    save_strategy="no",
    logging_steps=10,
    report_to="none",
    use_cpu=True,
    bf16=False,
    train_sampling_strategy="sequential",
)
trainer = SFTTrainer(
    model="model",
    args=arguments,
    train_dataset=Dataset.from_list(rows),
    callbacks=[MemoryWatch()],
)
trainer.train(resume_from_checkpoint=checkpoint)
"""


def test_growing_rows_are_saved_and_go_on_before_memory_runs_out(tmp_path: Path) -> None:
    make_project(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    guard = (sys.executable, "-m", "autotune", "guard", "--early", "--values", "micro=4,2")
    options = ("--values", "accumulate=1,2", "--checkpoints", "out/checkpoint-{step}")
    command = (sys.executable, "train.py", "{micro}", "{accumulate}", "{checkpoint}")
    done = run_in(tmp_path, *guard, *options, "--", *command)
    assert done.returncode == 0, done.stderr[-3000:]

    # 1. It was asked to save after a step, and did so there.
    request = re.search(r"asked to save after step (\d+)", done.stderr)
    assert request is not None and "the peak grows and reaches the limit" in done.stderr
    first, second = json.loads((tmp_path / "autotune-guard" / "guard.json").read_text())["attempts"]
    assert first["end"]["reason"] == "early"
    assert second["from_step"] >= int(request[1])

    # 2. Nothing was refused, and the restart is smaller.
    assert first["peak_bytes"] < first["limit_bytes"]
    assert first["change"] == {"micro": "2", "accumulate": "2"}
    assert second["last_step"] == second["from_step"] + STEPS_AFTER_THE_RESTART

    # 3. MemoryWatch reports the phases, the saving among them.
    phases = first["phase_peak_bytes"]
    assert {"forward", "backward", "optimizer", "checkpoint"} <= phases.keys()
    # Guard and trainer read the same process, not at the same moment.
    assert max(phases.values()) == pytest.approx(first["host_peak_bytes"], rel=0.1)
    assert first["longest_row"] > second["longest_row"] / 2 and first["ran_out"] is None
